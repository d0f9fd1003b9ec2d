"""A minimal, lossless decoder built on esp_kernels: many tokens per forward from a frozen model."""

from esp_decode.decoder import Decoder, Generation

__all__ = ["Decoder", "Generation"]
