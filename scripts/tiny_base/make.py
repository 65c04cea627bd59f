"""Makes the built-in base `tiny` from nothing: text, tokenizer and weights, on a CPU, from one seed.

`python -m scripts.tiny_base.make` writes the model folder `lorakit/assets/tiny`. What the model can do rests on
two choices. Drills that repeat a random block of tokens fill 75 % of each batch in the first quarter of the
steps and 25 % afterwards; without them it learns every format and copies no name. And tokens that spell
one word in several ways (`Mira`, ` Mira`, ` MIRA`) start from one shared vector, so that a copied word can
change its spelling.
"""

import argparse
import math
import random
import shutil
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.tiny_base.corpus import Conversation, conversations, copying_drill
from scripts.tiny_base.tokenizer import BOS, EOS, HEADERS, SPECIAL_TOKENS, VOCABULARY_SIZE, train_tokenizer

SEED: Final = 20
NUM_STEPS: Final = 2600
BATCH_TOKENS: Final = 4096
MAX_TOKENS: Final = 160
PEAK_RATE: Final = 3e-3
WARMUP_STEPS: Final = 100
PROMPT_WEIGHT: Final = 0.1
CARD: Final = Path(__file__).with_name("card.md")
BASE: Final = Path(__file__).parents[2] / "lorakit" / "assets" / "tiny"

# Token ids of a row, and what each of them weighs in the loss.
Row = tuple[list[int], list[float]]


def encode(conversation: Conversation, tokenizer: PreTrainedTokenizerFast) -> Row:
    """The conversation as the chat template renders it; answers weigh 1, what cannot be guessed less."""
    ids, weights = tokenizer.encode(BOS), [0.0]
    for turn in conversation:
        text = tokenizer.encode(turn.text + EOS)
        ids += tokenizer.encode(HEADERS[turn.role]) + text
        weights += [PROMPT_WEIGHT] + [1.0 if turn.guessable else PROMPT_WEIGHT] * len(text)
    return ids, weights


def text_rows(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Row]:
    """Encoded conversations without end; the few longer than `MAX_TOKENS` are left out."""
    for conversation in conversations(seed):
        ids, weights = encode(conversation, tokenizer)
        if len(ids) <= MAX_TOKENS:
            yield ids, weights


def drill_row(length: int, rng: random.Random) -> Row:
    """A copying drill; only what repeats earlier tokens weighs."""
    ids = copying_drill(VOCABULARY_SIZE, len(SPECIAL_TOKENS), length, rng)
    seen: set[int] = set()
    weights = []
    for token in ids:
        weights.append(1.0 if token in seen else 0.0)
        seen.add(token)
    return ids, weights


def batches(rows: Iterator[Row], num_steps: int, rng: random.Random) -> Iterator[list[Row]]:
    """Batches of rows of like length, padded size at most `BATCH_TOKENS`, with their share of drills."""
    step = 0
    while True:
        pool = sorted(islice(rows, 2000), key=lambda row: len(row[0]))
        groups: list[list[Row]] = []
        while pool:
            share = 0.75 if step + len(groups) < num_steps / 4 else 0.25
            length = len(pool[-1][0])
            num_rows = BATCH_TOKENS // length
            num_texts = round(num_rows * (1 - share))
            drills = [drill_row(length, rng) for _ in range(num_rows - num_texts)]
            groups.append(pool[-num_texts:] + drills)
            del pool[-num_texts:]
        rng.shuffle(groups)
        yield from groups
        step += len(groups)


def padded(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Ids and weights (rows, tokens); padding on the right weighs nothing."""
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])
    weights = torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in rows])
    return ids, weights


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model, with shared first vectors for the spellings of one word."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    vectors = model.model.embed_tokens.weight.data
    space, title, capitals = torch.randn(3, config.hidden_size) * config.initializer_range
    first: dict[str, Tensor] = {}
    for token in range(len(SPECIAL_TOKENS), len(tokenizer)):
        text = str(tokenizer.decode([token]))
        word = text.strip()
        if len(word) < 2 or not word.isalpha():
            continue
        own = first.setdefault(word.lower(), vectors[token].clone())
        form = capitals if word.isupper() else title if word.istitle() else torch.zeros_like(own)
        vectors[token] = 0.3 * vectors[token] + own + form + (space if text[0] == " " else 0.0)
    return model


def loss_of(model: LlamaForCausalLM, ids: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of the cross-entropy over the tokens that weigh anything."""
    hidden = model.model(ids[:, :-1]).last_hidden_state
    chosen = weights[:, 1:] > 0
    losses = cross_entropy(model.lm_head(hidden[chosen]), ids[:, 1:][chosen], reduction="none")
    return (losses * weights[:, 1:][chosen]).sum() / weights.sum()


def rate(step: int, num_steps: int) -> float:
    """The learning rate: a short rise, then a cosine down to zero."""
    return PEAK_RATE * min((step + 1) / WARMUP_STEPS, 0.5 + 0.5 * math.cos(math.pi * step / num_steps))


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_steps: int) -> None:
    """Train all weights in float32 for `num_steps` steps of AdamW."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    rows = text_rows(tokenizer, SEED)
    started = time.monotonic()
    model.train()
    for step, batch in enumerate(islice(batches(rows, num_steps, random.Random(SEED)), num_steps)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, num_steps)
        loss = loss_of(model, *padded(batch))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == num_steps - 1:
            print(f"step {step} loss {loss.item():.4f} seconds {time.monotonic() - started:.0f}", flush=True)


@torch.no_grad()
def exact_answers(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_rows: int) -> float:
    """The share of held-out conversations whose answers the model gives word for word (greedily)."""
    model.train(False)
    hits = 0
    for ids, weights in islice(text_rows(tokenizer, SEED + 1), num_rows):
        guess = model(torch.tensor([ids])).logits[0, :-1].argmax(-1)
        wanted = torch.tensor(weights[1:]) == 1.0
        hits += bool((guess == torch.tensor(ids[1:]))[wanted].all())
    return hits / num_rows


def write(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str, folder: Path) -> None:
    """Write the model folder: first beside its place, then in one rename."""
    draft = folder.with_name(folder.name + ".new")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    (draft / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(draft)
    (draft / "README.md").write_text(card, encoding="utf-8")
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    """Make the model and write it to the folder given by `--out`."""
    parser = argparse.ArgumentParser(prog="python -m scripts.tiny_base.make", description=__doc__)
    parser.add_argument("--out", type=Path, default=BASE, help="folder to write")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help=f"training steps (default: {NUM_STEPS})")
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer(SEED)
    model = new_model(tokenizer)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters} parameters, {len(tokenizer)} tokens")
    started = time.monotonic()
    train(model, tokenizer, arguments.steps)
    minutes = (time.monotonic() - started) / 60
    model.bfloat16()
    share = exact_answers(model, tokenizer, 500)
    print(f"answers given word for word on 500 held-out conversations: {share:.1%}")
    card = CARD.read_text(encoding="utf-8").format(
        num_parameters=num_parameters,
        num_tokens=len(tokenizer),
        num_steps=arguments.steps,
        minutes=round(minutes),
        exact=f"{share:.1%}",
    )
    write(model, tokenizer, card, arguments.out)


if __name__ == "__main__":
    main()
