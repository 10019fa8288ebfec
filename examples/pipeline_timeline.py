"""A pipeline, its timeline, what its stages hold, and how good its gradients are.

python examples/pipeline_timeline.py            # writes timeline.png beside where you are
"""

import torch
import torch.nn.functional as F

import redivider as rd


def main() -> None:
    """Train a small Rev-ViT on noise in three stages, and look at it."""
    torch.manual_seed(0)
    model = rd.create_model(
        "rev_vit_tiny", depth=3, width=48, image_size=32, patch_size=8, num_classes=10
    )
    pipe = rd.Pipeline(
        model,
        stages=3,
        loss=F.cross_entropy,
        optimizer=lambda stage: rd.Muon(stage, lr=0.002),
        accumulate=8,
        latency=0.5,
    )
    print(pipe)
    print(pipe.timeline(), end="\n\n")
    pipe.timeline().plot("timeline.png")
    probe = pipe.probe(every=12)
    kinds = torch.randn(10, 3, 32, 32)  # ten images, to be told apart under noise
    for n in range(24):
        targets = torch.randint(10, (16,))
        tick = pipe.step(kinds[targets] + 0.3 * torch.randn(16, 3, 32, 32), targets)
        if tick.microbatch is not None and n % 8 == 7:
            print(f"micro-batch {tick.microbatch}: loss {tick.loss:.3f}")
    print(rd.measure_memory(pipe, kinds[targets]), end="\n\n")
    print(probe)
    pipe.flush()


if __name__ == "__main__":
    main()
