"""The specification of every op in plain PyTorch; itself a backend (`backend="ref"`)."""
