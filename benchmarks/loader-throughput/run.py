"""How many images a second the loaders make, on one core or on a device.

Images in memory: 50,000 random images of CIFAR's size; order, crop, flip and normalisation of whole
batches on the images' device. Class folders: JPEG files of photographs' size, decoded, cropped to
224 x 224 and flipped in this process, as each worker does it. Figures are medians over rounds; an
epoch may begin within a round.

    python benchmarks/loader-throughput/run.py
    python benchmarks/loader-throughput/run.py --device cuda
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from redivider.data import Batches, Folder, Images
from redivider.data.batches import Batch
from redivider.data.cifar import MEAN, STD


def make_images(num: int = 50_000) -> Images:
    """Return noise instead of CIFAR-10: the work does not depend on the values."""
    pixels = torch.randint(256, (num, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(10, (num,))
    return Images("noise", pixels, labels, 10, MEAN, STD, padding=4, flip=True)


def make_folder(root: Path, num: int = 64) -> Folder:
    """Write smooth noise of 500 x 375 pixels, the commonest size in ImageNet."""
    (root / "class").mkdir()
    for i in range(num):
        coarse = torch.randint(256, (24, 32, 3), dtype=torch.uint8)
        image = Image.fromarray(coarse.numpy()).resize((500, 375))
        image.save(root / "class" / f"{i:03}.JPEG", quality=92)
    return Folder(root, mean=MEAN, std=STD)


def rate(batches: Batches, *, seconds: float, rounds: int) -> list[float]:
    """Return the images a second of each round, one batch after another as in training."""
    visits, rates = _without_end(batches), []
    next(visits)
    for _ in range(rounds):
        _wait(batches.device)
        start, num = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            x, _ = next(visits)
            num += len(x)
        _wait(batches.device)
        rates.append(num / (time.perf_counter() - start))
    return rates


def _without_end(batches: Batches) -> Iterator[Batch]:
    while True:
        yield from batches.since(0)  # in training this has no end


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    name = (
        torch.cuda.get_device_name(options.device)
        if torch.device(options.device).type == "cuda"
        else platform.processor() or platform.machine()
    )
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}, {vars(options)}")
    print("| images | batch | images/s (quartiles) |")
    print("|---|---|---|")

    def report(what: str, batch: int, build: Callable[[], Batches]) -> None:
        rates = rate(build(), seconds=options.seconds, rounds=options.rounds)
        low, middle, high = statistics.quantiles(rates, n=4)
        print(f"| {what} | {batch} | {middle:,.0f} ({low:,.0f} to {high:,.0f}) |", flush=True)

    images = make_images()
    place = {"device": options.device}
    for batch in (64, 256, 1024):
        report("32 x 32, training", batch, partial(images.batches, batch, train=True, **place))
    report(
        "32 x 32, training, channels_last",
        256,
        lambda: images.batches(256, train=True, channels_last=True, **place),
    )
    report("32 x 32, evaluation", 256, lambda: images.batches(256, train=False, **place))
    with tempfile.TemporaryDirectory() as root:
        folder = make_folder(Path(root))
        for mode, train in (("training", True), ("evaluation", False)):
            report(
                f"500 x 375 JPEG to 224 x 224, {mode}",
                16,
                partial(folder.batches, 16, train=train, num_workers=0, **place),
            )


if __name__ == "__main__":
    main()
