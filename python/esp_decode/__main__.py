import sys

from esp_decode.cli import main

sys.exit(main())
