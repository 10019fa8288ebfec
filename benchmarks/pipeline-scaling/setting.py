"""Setting of all methods: a Rev-ViT of equal layers, random images, SGD."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import redivider as rd


@dataclass(frozen=True)
class Setting:
    """Sizes of the network and of the runs."""

    depth: int = 8
    width: int = 192
    batch: int = 8
    """Samples of a micro-batch."""
    patch_size: int = 4
    num_microbatches: int = 16
    """In a timed run."""
    rounds: int = 5
    patience: float = 0.0
    """Seconds that a run may wait until no other program uses the machine."""

    def model(self, device: str = "cpu") -> rd.Chain:
        """Return a stem, two couplings for each layer, and a head."""
        return rd.create_model(
            "rev_vit_tiny",
            image_size=32,
            num_classes=10,
            patch_size=self.patch_size,
            depth=self.depth,
            width=self.width,
            device=device,
            seed=0,
        )

    def examples(self, num: int = 1) -> tuple[Tensor, Tensor]:
        """Return images and targets of `num` micro-batches."""
        generator = torch.Generator().manual_seed(0)
        size = num * self.batch
        images = torch.randn(size, 3, 32, 32, generator=generator)
        return images, torch.randint(10, (size,), generator=generator)

    def cut(self, num_stages: int) -> list[int]:
        """Return the number of units of each stage, balanced by FLOPs."""
        return rd.balance(self.model(), num_stages, example=self.examples()[0])

    @property
    def stream_bytes(self) -> int:
        """Bytes of one of the two streams between stages, in float32."""
        return 4 * self.batch * (32 // self.patch_size) ** 2 * self.width


def sgd(stage: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a stage, the same for all methods."""
    return torch.optim.SGD(stage.parameters(), lr=1e-3, momentum=0.9)


loss = F.cross_entropy
