"""Reversible models under the tools that people train with; `make interop` installs them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.compressed import Watched, follow

import redivider as rd
from redivider.backward import tape

transformers: Any = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def make():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def samples(number=16):
    tokens = torch.randint(3, 50, (number, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def batch(number=4):
    rows = samples(number)
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def gradients(model):
    torch.manual_seed(3)
    model.zero_grad()
    model.train()
    model(**batch()).loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.requires_grad}
    return torch.cat([grad.flatten() for grad in grads.values() if grad is not None])


def test_lora_of_peft():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)

    def adapted():
        torch.manual_seed(1)
        model = peft.get_peft_model(make(), config)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.normal_(std=0.1)  # zero at first, which would hide the adapters
        return model

    for is_first in (True, False):
        reference = adapted()
        if is_first:
            model = adapted()
            rd.make_reversible(model, 2)
        else:
            torch.manual_seed(1)
            model = peft.get_peft_model(rd.make_reversible(make(), 2), config)
            model.load_state_dict(reference.state_dict())
        follow(reference.base_model.model.model.layers, 2)
        got, true = gradients(model), gradients(reference)
        assert len(got) == sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert (got - true).norm() <= 1e-6 * true.norm()
        assert all(
            "lora" in name for name, param in model.named_parameters() if param.requires_grad
        )


@pytest.fixture
def watched(monkeypatch):
    """Return the class of tapes, which counts the inputs that it reads back."""
    monkeypatch.setattr(tape, "Tape", Watched)
    monkeypatch.setattr(Watched, "num_compared", 0)
    return Watched


def test_trainer_of_transformers(tmp_path, watched):
    pytest.importorskip("accelerate")
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_steps=4,
        disable_tqdm=True,
    )
    model = rd.make_reversible(make(), 2)
    before = model(**batch()).loss
    trainer = transformers.Trainer(model=model, args=args, train_dataset=samples())
    trainer.train()
    model.eval()
    after = model(**batch()).loss
    assert after < before
    assert watched.num_compared == 4 * 2 * 4  # steps, micro-batches and blocks
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4").eval()
    assert torch.equal(loaded(**batch()).loss, after)
    args.gradient_checkpointing = True
    trainer = transformers.Trainer(model=model.train(), args=args, train_dataset=samples())
    with pytest.raises(ValueError, match="gradient checkpointing is not for a reversible model"):
        trainer.train()


def test_accelerate(watched):
    accelerate = pytest.importorskip("accelerate")
    model = rd.make_reversible(make(), 2)
    expected = gradients(model).clone()
    assert watched.num_compared == 4
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(3)
    optimizer.zero_grad()
    accelerator.backward(prepared(**batch()).loss)
    grads = [param.grad for param in model.parameters()]
    assert torch.equal(torch.cat([grad.flatten() for grad in grads if grad is not None]), expected)
    assert watched.num_compared == 2 * 4
    optimizer.step()


def test_lightning(tmp_path, watched):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self):
            super().__init__()
            self.model = rd.make_reversible(make(), 2)
            self.losses: list[float] = []

        def training_step(self, rows: Any, index: int) -> Any:
            loss = self.model(**rows).loss
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=0.5)

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=Path(tmp_path),
    )
    trainer.fit(module, torch.utils.data.DataLoader(samples(), batch_size=4))
    assert len(module.losses) == 12 and module.losses[-1] < module.losses[0]
    assert watched.num_compared == 12 * 4
