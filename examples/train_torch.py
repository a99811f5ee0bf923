"""Trains a small transformer with FlashCore's attention and with PyTorch's, side by side.

    python examples/train_torch.py [--steps 100] [--device cpu]

The text is generated: sums, a line each (``37+5=42``). Nothing is downloaded. Both models begin with
the same weights and see the same text, so their losses are the same up to rounding, and both fall.
"""

import argparse
import random
import time

import torch
import torch.nn.functional as F
from flashcore import flash_attn_qkvpacked_func

LETTERS = "0123456789+=\n"
LENGTH, WIDTH, HEADS, LAYERS, BATCH = 128, 128, 4, 2, 4


def flashcore(qkv):
    return flash_attn_qkvpacked_func(qkv, causal=True)


def pytorch(qkv):
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.before, self.between = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.before(x)).unflatten(2, (3, HEADS, WIDTH // HEADS))
        x = x + self.out(self.attention(qkv).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.letters = torch.nn.Embedding(len(LETTERS), WIDTH)
        self.places = torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block(attention) for _ in range(LAYERS)))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, len(LETTERS))

    def forward(self, text):
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.letters(text) + self.places(places))))


def batch(numbers):
    """Lines of sums as numbers of letters, one letter more than a model reads."""
    texts = []
    for _ in range(BATCH):
        text = ""
        while len(text) <= LENGTH:
            one, other = numbers.randrange(50), numbers.randrange(50)
            text += f"{one}+{other}={one + other}\n"
        texts.append([LETTERS.index(letter) for letter in text[: LENGTH + 1]])
    return torch.tensor(texts)


def train(attention, steps, device):
    """The loss of each step, and the seconds of all of them."""
    torch.manual_seed(0)
    numbers = random.Random(0)
    model = Transformer(attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    begin = time.perf_counter()
    for _ in range(steps):
        text = batch(numbers).to(device)
        # FlashCore's gradients on a GPU are those of 16-bit tensors.
        with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
            letters = model(text[:, :-1])
        loss = F.cross_entropy(letters.float().flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps {given.steps}, expected 1 or more")
    ours, seconds = train(flashcore, given.steps, given.device)
    theirs, others = train(pytorch, given.steps, given.device)
    print("step  FlashCore  PyTorch")
    every = max(1, given.steps // 12)
    for step in [*range(0, given.steps - 1, every), given.steps - 1]:
        print(f"{step + 1:4}  {ours[step]:9.4f}  {theirs[step]:7.4f}")
    apart = max(abs(one - other) for one, other in zip(ours, theirs))
    print(f"at most {apart:.1e} apart; {seconds:.1f} s and {others:.1f} s on {given.device}")


if __name__ == "__main__":
    main()
