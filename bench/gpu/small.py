"""Every op once by every GPU backend on small inputs, for compute-sanitizer."""

from itertools import product

import torch

from bench import cases
from bench.cases import Size
from esp_decode.roofline import Shape
from esp_kernels import _backend

SMALL = Shape(2, 128, 192, 6, 2, 64, 1000)


def main() -> None:
    torch.set_default_device("cuda")
    for op, backend in product(cases.OPS, ("triton", "cuda")):
        if _backend.why_not(op, backend, "cuda") is None:
            for rows in (1, 20):
                cases.OPS[op](Size("small", SMALL, rows, prefix=300, batch=2), backend)()
            torch.cuda.synchronize()
            print(op, backend, flush=True)


if __name__ == "__main__":
    main()
