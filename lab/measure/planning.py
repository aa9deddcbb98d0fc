"""Expected steps of Llama shapes on machines that were not available: arithmetic on the figures named below.

    python lab/measure/planning.py

prints the tables of docs/scaling.md. A step over r rows of one sequence, on N GPUs that each hold a part of
every layer, is taken to need

    max(weights / (N x bandwidth x 0.85), 2 x parameters x r / (N x operations x 0.6))
    + 2 x layers x (latency of an all_reduce + its bytes / link)        where N > 1
    + 0.3 ms for the host.

The share 0.85 of the bandwidth and the host's time are assumptions, and so are all latencies. Keys and values
are left out: of a text of 4096 tokens they are under 2% of the weights of these shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.policy.governor import WIDTHS
from outpace.policy.latency import Latency
from outpace.targets.ranks.shared_drafts import deal, typical


@dataclass(frozen=True)
class Gpu:
    """A GPU: bytes, bytes per second, dense bfloat16 operations per second, bytes per second of its link."""

    name: str
    memory: float
    bandwidth: float
    operations: float
    link: float


@dataclass(frozen=True)
class Model:
    """A Llama shape: parameters, layers, hidden size."""

    name: str
    parameters: float
    layers: int
    hidden: int

    @property
    def weights(self) -> float:
        return 2 * self.parameters


H100 = Gpu("H100 SXM", 80e9, 3.35e12, 989e12, 450e9)
H200 = Gpu("H200 SXM", 141e9, 4.8e12, 989e12, 450e9)
MODELS = [
    Model("7B", 6.7e9, 32, 4096),
    Model("13B", 13.0e9, 40, 5120),
    Model("34B", 34.0e9, 48, 8192),
    Model("70B", 70.6e9, 80, 8192),
    Model("405B", 405e9, 126, 16384),
]
BANDWIDTH_SHARE, OPERATION_SHARE, HOST = 0.85, 0.6, 0.3e-3
INSIDE, BETWEEN = 10e-6, 30e-6  # seconds of a small all_reduce inside a machine, and between machines
NETWORK = 50e9  # bytes per second between machines: 400 Gb/s per GPU
TELLING = 0.2e-3  # seconds of telling tokens over gloo, inside a machine


def seconds(model: Model, gpu: Gpu, gpus: int, rows: int) -> float:
    """Seconds of a step."""
    read = model.weights / (gpus * gpu.bandwidth * BANDWIDTH_SHARE)
    computed = 2 * model.parameters * rows / (gpus * gpu.operations * OPERATION_SHARE)
    telling = 0.0
    if gpus > 1:
        latency, link = (INSIDE, gpu.link) if gpus <= 8 else (BETWEEN, NETWORK)
        telling = 2 * model.layers * (latency + 2 * rows * model.hidden * 2 / link)
    return max(read, computed) + telling + HOST


def fits(model: Model, gpu: Gpu, gpus: int) -> bool:
    """True if a model fits with a fifth of the memory left for keys, values and activations."""
    return model.weights <= 0.8 * gpu.memory * gpus


def tensor(gpu: Gpu) -> None:
    print(
        f"\n{gpu.name}, bfloat16, one sequence: ms of a plain step / of one over 56 rows (tokens/s plain)\n"
    )
    counts = (1, 2, 4, 8, 16)
    print("| model | " + " | ".join(f"{n} GPU{'s' * (n > 1)}" for n in counts) + " |")
    print("| --- |" + " ---: |" * len(counts))
    for model in MODELS:
        cells = []
        for n in counts:
            if not fits(model, gpu, n):
                cells.append("-")
                continue
            plain, wide = seconds(model, gpu, n, 1), seconds(model, gpu, n, 56)
            cells.append(f"{1e3 * plain:.1f} / {1e3 * wide:.1f} ({1 / plain:.0f})")
        print(f"| {model.name} | " + " | ".join(cells) + " |")


def draft(gpu: Gpu) -> None:
    print(f"\n{gpu.name}: nodes from which on sharing a draft pays, and the gain at 128 and 512 nodes\n")
    print("| model | ranks | pays from | 128 nodes | 512 nodes |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for model in MODELS:
        for ranks in (2, 4, 8):
            if not fits(model, gpu, 1):
                continue

            def share(nodes: int, ranks: int = ranks) -> int:
                return max(map(len, deal(typical(nodes), ranks)))

            forwards = {r: seconds(model, gpu, 1, r) for r in (1, *range(32, 1025, 32))}
            latency = Latency(forwards, TELLING, share)
            least = next((n for n in (*WIDTHS, *range(272, 1009, 16)) if _pays(latency, n)), None)
            gains = [latency.alone(n) / latency.shared(n) for n in (128, 512)]
            cells = f"{least or 'never'} | {gains[0]:.2f} x | {gains[1]:.2f} x"
            print(f"| {model.name} | {ranks} | {cells} |")


def _pays(latency: Latency, nodes: int) -> bool:
    return 1.05 * latency.shared(nodes) < latency.alone(nodes)


if __name__ == "__main__":
    for one in (H100, H200):
        tensor(one)
    draft(H100)
