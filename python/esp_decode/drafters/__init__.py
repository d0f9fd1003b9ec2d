"""Drafters: who guesses the tokens of the next block."""

from esp_decode.drafters.base import Draft, Drafter, Outcome, Verdict
from esp_decode.drafters.esp import EspDrafter
from esp_decode.drafters.options import DraftOptions
from esp_decode.names import DRAFTERS

__all__ = ["DRAFTERS", "Draft", "DraftOptions", "Drafter", "EspDrafter", "Outcome", "Verdict"]
