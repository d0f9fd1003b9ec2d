"""Where a decode step's time goes: `python profiling/step.py --budget 10` prints each op's share of the step.

--trace FILE writes a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing. For Nsight Systems there is
profiling/nsys.py, which runs this with --external.
"""

import argparse
from collections.abc import Iterator
from itertools import islice

import torch
from torch.profiler import ProfilerActivity, profile

from esp_decode import Decoder
from esp_decode.graph import StepGraph
from esp_decode.loop import new_state, prefill, step, tensors_of
from esp_kernels.nvtx import span

PROMPT = "Explain how a kettle works, step by step."
WARM_UP = 3


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
    parser.add_argument("--graph", action="store_true", help="the step as a CUDA graph, as decoding runs it")
    parser.add_argument("--trace", metavar="FILE")
    parser.add_argument(
        "--external", action="store_true", help="only mark the steps, for a profiler that runs this"
    )
    arguments = vars(parser.parse_args())
    steps, graph, trace, external = (arguments.pop(name) for name in ("steps", "graph", "trace", "external"))
    if steps < 1:
        parser.error(f"steps must be at least 1, got {steps}")
    try:
        decoder = Decoder.from_pretrained(**arguments)
    except ValueError as error:
        parser.error(str(error))
    if decoder.device != "cuda" and (graph or external):
        parser.error("--graph and --external need a CUDA card")
    run = decode_calls(decoder, steps + WARM_UP, graph)
    for _ in islice(run, WARM_UP):
        pass
    if external:
        torch.cuda.profiler.start()
        for _ in run:
            pass
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return
    activities = [ProfilerActivity.CPU]
    if decoder.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in run:
            pass
    report(profiler, steps)
    if trace:
        profiler.export_chrome_trace(trace)


def decode_calls(decoder: Decoder, steps: int, graph: bool) -> Iterator[object]:
    """Runs `steps` decode calls behind one prompt, giving control back after each."""
    model = decoder.model
    prompt = torch.tensor([decoder.encode(PROMPT)], dtype=torch.int32, device=model.device)
    drafter = decoder.options.drafter_for(model)
    state = new_state(model, drafter, 1, prompt.shape[1] + (steps + 4) * (drafter.rows + 1))
    with span("prefill"):
        prefill(model, drafter, prompt, state)
    if graph:
        captured = StepGraph(lambda: step(model, drafter, state).committed, tensors_of(state))
        yield from islice(captured.replays(), steps)
        return
    for _ in range(steps):
        with span("step"):
            yield step(model, drafter, state)


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
