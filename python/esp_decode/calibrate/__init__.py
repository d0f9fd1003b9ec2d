"""Measures, on a user's own prompts, what drafts are worth, and fits a profile to it."""
