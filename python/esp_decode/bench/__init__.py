"""`esp bench` and `esp ablate`: drafters against plain decoding of the same engine, on a user's prompts."""
