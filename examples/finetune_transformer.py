"""Fine-tune a GPT-2 of transformers in two bits per value and layer.

python examples/finetune_transformer.py          # pip install transformers

The network is small and has random weights, so that nothing is downloaded. With
`GPT2LMHeadModel.from_pretrained("gpt2")` it is the real one.
"""

import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import redivider as rd


def train(model: GPT2LMHeadModel, tokens: torch.Tensor) -> float:
    """Train for a few steps; return the last loss."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    """Compare plain and reversible fine-tuning."""
    torch.manual_seed(0)
    tokens = torch.randint(1000, (2, 64))
    config = GPT2Config(
        vocab_size=1000, n_layer=6, n_embd=64, n_head=4, bos_token_id=0, eos_token_id=0
    )
    plain = GPT2LMHeadModel(config).train()
    model = rd.make_reversible(copy.deepcopy(plain))
    for name, net in (("plain", plain), ("reversible", model)):
        held = rd.measure_memory(net.transformer, tokens).held
        loss = train(net, tokens)
        print(f"{name:>10}: holds {held / 1024:,.0f} KiB, ends at a loss of {loss:.3f}")
    with torch.no_grad():
        again = rd.make_plain(copy.deepcopy(model)).eval()
        same = torch.equal(model.eval()(tokens).logits, again(tokens).logits)
    print(f"outputs of the reversible network and of the plain one with its weights agree: {same}")


if __name__ == "__main__":
    main()
