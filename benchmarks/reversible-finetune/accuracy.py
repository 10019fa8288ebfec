"""Fine-tune a network plainly and in few bits, and evaluate it.

    python benchmarks/reversible-finetune/accuracy.py gpt --data FOLDER --out results.jsonl
    python benchmarks/reversible-finetune/accuracy.py vit --data FOLDER --out results.jsonl

gpt: GPT-2 small of transformers on bytes: one epoch of the first 20 MB of FOLDER/enwik8, then
FOLDER/wikitext-2. vit: ViT small of transformers on CIFAR-10: the classes 0 to 4, then all ten. The
first network is trained once, and kept in FOLDER; runs that are in results.jsonl are not repeated.
`--quick` runs both at a size for a CPU.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import redivider as rd

# By bits (0 for the plain network) and seed.
METHODS = ("0/0", "2/0", "0/1", "2/1", "0/2", "2/2", "1/0", "3/0", "4/0", "8/0")
Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass
class Task:
    """A network, and what it learns first and then."""

    make_model: Callable[[], Any]
    first: Callable[[torch.Generator], Batches]
    then: Callable[[torch.Generator], Batches]
    evaluate: Callable[[Any], float]
    loss: Callable[[Any, Tensor, Tensor], Tensor]
    num_first: int
    num_then: int
    lr: float


def windows(data: Tensor, context: int, batch: int) -> Callable[[torch.Generator], Batches]:
    """Return a function that yields batches of windows of a text, anywhere in it."""

    def run(generator: torch.Generator) -> Batches:
        while True:
            starts = torch.randint(len(data) - context - 1, (batch,), generator=generator)
            index = starts[:, None] + torch.arange(context + 1)
            tokens = data[index.to(data.device)].long()
            yield tokens[:, :-1], tokens[:, 1:]

    return run


def read_bytes(path: Path, num: int, device: str) -> Tensor:
    """Return the first bytes of a file."""
    with path.open("rb") as file:
        return torch.frombuffer(bytearray(file.read(num)), dtype=torch.uint8).to(device)


def gpt(args: argparse.Namespace) -> Task:
    """Return the task of a language model on bytes."""
    small: Any = {"n_layer": 2, "n_embd": 64, "n_head": 2} if args.quick else {}
    context, batch = (64, 4) if args.quick else (1024, 32)
    old = read_bytes(args.data / "enwik8", 20_000_000, args.device)
    new = read_bytes(args.data / "wikitext-2" / "train.txt", 2**30, args.device)
    test = read_bytes(args.data / "wikitext-2" / "test.txt", 2**30, args.device)
    num_test = 4 if args.quick else 24
    held_out = [
        (part[:, :-1].long(), part[:, 1:].long())
        for part in test[: num_test * batch * (context + 1)].view(num_test, batch, context + 1)
    ]

    def make_model() -> Any:
        config = transformers.GPT2Config(vocab_size=256, n_positions=context, **small)
        return transformers.GPT2LMHeadModel(config)

    def loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def evaluate(model: Any) -> float:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            return float(torch.stack([loss(model, *pair) for pair in held_out]).mean())

    return Task(
        make_model,
        windows(old, context, batch),
        windows(new, context, batch),
        evaluate,
        loss,
        16 if args.quick else 20_000_000 // (context * batch),
        8 if args.quick else args.steps or 300,
        1e-4,
    )


def images(x: Tensor, y: Tensor, batch: int, classes: int) -> Callable[[torch.Generator], Batches]:
    """Return a function that yields batches of the first classes, shifted and mirrored."""
    chosen = (y < classes).nonzero().squeeze(1)

    def run(generator: torch.Generator) -> Batches:
        while True:
            picks = chosen[torch.randint(len(chosen), (batch,), generator=generator).to(x.device)]
            shifts = torch.randint(-4, 5, (2,), generator=generator).tolist()
            batch_x = torch.roll(x[picks], shifts, (2, 3))
            if torch.rand((), generator=generator) < 0.5:
                batch_x = batch_x.flip(3)
            yield batch_x, y[picks]

    return run


def vit(args: argparse.Namespace) -> Task:
    """Return the task of a classifier of images."""
    small: Any = {
        "num_labels": 10,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
    }
    usual: Any = {
        "num_labels": 10,
        "num_hidden_layers": 12,
        "hidden_size": 384,
        "intermediate_size": 1536,
    }
    heads, batch = (2, 8) if args.quick else (6, 128)
    folder = args.data / "cifar-10-batches-bin"
    rows = [
        torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=torch.uint8).view(-1, 3073)
        for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    ]
    data = torch.cat(rows).to(args.device)
    x = (data[:, 1:].view(-1, 3, 32, 32).float() / 255 - 0.5) / 0.25
    y = data[:, 0].long()
    train, test = slice(0, 50_000), slice(50_000, 50_200 if args.quick else 60_000)

    def make_model() -> Any:
        config = transformers.ViTConfig(
            image_size=32,
            patch_size=8 if args.quick else 4,
            num_attention_heads=heads,
            hidden_dropout_prob=0.1,
            **(small if args.quick else usual),
        )
        return transformers.ViTForImageClassification(config)

    def loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).logits.float(), targets)

    @torch.no_grad()
    def evaluate(model: Any) -> float:
        pairs = zip(torch.split(x[test], 1000), torch.split(y[test], 1000), strict=True)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            hits = [(model(part).logits.argmax(1) == true).float() for part, true in pairs]
        return 100 * float(torch.cat(hits).mean())

    steps = (4, 2) if args.quick else (5 * 25_000 // batch, args.steps or 5 * 50_000 // batch)
    return Task(
        make_model,
        images(x[train], y[train], batch, 5),
        images(x[train], y[train], batch, 10),
        evaluate,
        loss,
        *steps,
        3e-4,
    )


def train(
    task: Task, model: Any, batches: Batches, num: int, lr: float, device: str
) -> list[float]:
    """Train for a number of steps: AdamW, a short warm-up and a cosine; return some losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.05)
    warmup = max(1, num // 20)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, num - warmup))
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=warmup)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, decay], [warmup])
    losses = []
    model.train()
    for step in range(num):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = task.loss(model, *next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % max(1, num // 10) == 0:
            losses.append(round(float(loss.detach()), 4))
    model.eval()
    return losses


def base(task: Task, args: argparse.Namespace) -> Any:
    """Return the network that has learned the first task, from a file if there is one."""
    torch.manual_seed(0)
    model = task.make_model().to(args.device)
    path = args.data / f"base-{args.task}{'-quick' if args.quick else ''}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, map_location=args.device))
        return model.eval()
    generator = torch.Generator().manual_seed(0)
    losses = train(task, model, task.first(generator), task.num_first, args.first_lr, args.device)
    print("first:", losses, flush=True)
    torch.save(model.state_dict(), path)
    return model


def run(task: Task, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Fine-tune with a number of bits and a seed; return what came of it."""
    bits, seed = map(int, name.split("/"))
    model = base(task, args)
    if bits:
        rd.make_reversible(model, bits)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(100 + seed)
    began = time.perf_counter()
    losses = train(task, model, task.then(generator), task.num_then, task.lr, args.device)
    seconds = time.perf_counter() - began
    result = {"task": args.task, "run": name, "steps": task.num_then, "lr": task.lr}
    return {**result, "result": task.evaluate(model), "losses": losses, "seconds": seconds}


def main() -> None:
    """Run the methods, and write a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=["gpt", "vit"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--steps", type=int, help="of fine-tuning")
    parser.add_argument("--first-lr", type=float, default=5e-4)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    task = {"gpt": gpt, "vit": vit}[args.task](args)
    print(f"before: {task.evaluate(base(task, args)):.4f}", flush=True)
    done = args.out.read_text().splitlines() if args.out and args.out.exists() else []
    keys = {(row["task"], row["run"], row["steps"]) for row in map(json.loads, done)}
    for name in args.methods:
        if (args.task, name, task.num_then) in keys:
            continue
        row = run(task, args, name)
        print(f"{name:10} {row['result']:.4f} in {row['seconds']:.0f} s", flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
