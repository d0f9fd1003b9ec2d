"""What people choose by name, without torch."""

DRAFTERS = ("ar", "esp", "joined", "pld", "lade", "stand", "recycling", "suffix", "medusa", "eagle2")
PROBES = (
    "prompt-mean",
    "frozen",
    "last-k",
    "sample",
    "vocab-mean",
    "vocab-median",
    "prompt-direction",
)
