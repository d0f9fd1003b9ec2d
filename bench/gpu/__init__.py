"""What `make gpu-check` runs on a CUDA card, one part a module: `python -m bench.gpu.<part> --out FILE`."""
