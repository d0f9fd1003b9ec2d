"""A minimal, lossless decoder built on esp_kernels: many tokens per forward from a frozen model."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esp_decode.decoder import Decoder, Generation

__all__ = ["Decoder", "Generation"]


def __getattr__(name: str) -> Any:
    """Imports torch when a decoder is asked for, not before: `esp --help` answers at once."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from esp_decode import decoder

    return getattr(decoder, name)
