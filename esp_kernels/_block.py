"""What `parent` holds for a row that hangs from no other; csrc/include/esp/block.h has the same."""

ROOT = -1
PADDING = -2
