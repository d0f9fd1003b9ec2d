"""Where a decode step's time goes: `python profiling/step.py --budget 10` prints each op's share of the step.

--trace FILE writes a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing. Under Nsight Systems the
same run shows the NVTX ranges `prefill` and `step` of the domain esp_kernels: see profiling/README.md.
"""

import argparse
from itertools import islice

import torch
from torch.profiler import ProfilerActivity, profile

from esp_decode import Decoder
from esp_decode.loop import new_state, prefill, step

PROMPT = "Explain how a kettle works, step by step."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="esp")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--masks", type=int, default=1)
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trace", metavar="FILE")
    arguments = vars(parser.parse_args())
    steps, trace = arguments.pop("steps"), arguments.pop("trace")

    decoder = Decoder.from_pretrained(**arguments)
    run = decode_calls(decoder, steps + 3)
    for _ in islice(run, 3):
        pass
    activities = [ProfilerActivity.CPU]
    if decoder.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in run:
            pass
    report(profiler, steps)
    if trace:
        profiler.export_chrome_trace(trace)


def decode_calls(decoder: Decoder, steps: int):
    """Runs `steps` decode calls behind one prompt, giving control back after each."""
    model = decoder.model
    prompt = torch.tensor([decoder.encode(PROMPT)], dtype=torch.int32, device=model.device)
    drafter = decoder.options.drafter_for(model)
    state = new_state(model, drafter, 1, prompt.shape[1] + (steps + 1) * (drafter.rows + 1))
    prefill(model, drafter, prompt, state)
    for _ in range(steps):
        step(model, drafter, state)
        yield


def report(profiler: profile, steps: int) -> None:
    events = [e for e in profiler.key_averages() if e.self_cpu_time_total or e.self_device_time_total]
    times = {e.key: max(e.self_cpu_time_total, e.self_device_time_total) for e in events}
    total = sum(times.values())
    print(f"{'op':44}{'calls/step':>12}{'us/step':>12}{'share':>8}")
    for event in sorted(events, key=lambda e: -times[e.key])[:24]:
        spent = times[event.key]
        print(f"{event.key[:43]:44}{event.count / steps:12.1f}{spent / steps:12.1f}{spent / total:8.1%}")
    print(f"{'all':44}{'':12}{total / steps:12.1f}{1:8.0%}")


if __name__ == "__main__":
    main()
