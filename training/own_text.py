"""Text that a chat model writes itself, of many forms and topics: calibration text where nothing better is at hand.

A model's own text is close to what it was trained on, which is rarely public.
Run as ``python -m training.own_text MODEL --out FOLDER``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from kairox_jax.config import GenerationConfig
from kairox_jax.engine import Engine
from kairox_jax.engine.serving import Worker
from kairox_jax.engine.tickets import Request
from kairox_jax.io import render_chat

SEQUENCES = 8
FORMS = (
    "Write a short story about {}.",
    "Write the first chapter of a novel in which {} plays a part.",
    "Write an encyclopedia article about {}.",
    "Write a newspaper report about {}.",
    "Write a personal letter to an old friend about {}.",
    "Write a school textbook's section about {}, with examples.",
    "Write a magazine essay that argues a strong opinion about {}.",
    "Write a practical guide for beginners about {}.",
    "Write a conversation between two people who disagree about {}.",
    "Write a blog post about a day that had to do with {}.",
)
TOPICS = (
    *("a lighthouse", "the history of bread", "volcanoes", "learning to swim", "a small railway station"),
    *("the human heart", "honey bees", "a lost dog", "the printing press", "winter in the mountains"),
    *("a village school", "how vaccines work", "the Roman empire", "city traffic", "an old violin"),
    *("growing tomatoes", "the Moon", "a family dinner", "electric cars", "the fear of speaking in public"),
    *("a football match", "coral reefs", "saving money", "a detective", "the invention of paper"),
    *("friendship", "earthquakes", "a market in the morning", "jazz", "sleep"),
)


def prompts(count: int) -> Iterator[tuple[str, str]]:
    """Yield the names of ``count`` texts and what is asked for: every form in turn, then the next topic."""
    if not 1 <= count <= len(FORMS) * len(TOPICS):
        raise ValueError(f"--texts {count}: choose 1 to {len(FORMS) * len(TOPICS)}")
    for index in range(count):
        form, topic = index % len(FORMS), (index + index // len(FORMS)) % len(TOPICS)
        yield f"own-{index:03d}.txt", FORMS[form].format(TOPICS[topic])


def write_texts(model: str, out: Path, *, count: int, tokens: int, temperature: float, seed: int) -> None:
    """Write ``count`` files of at most ``tokens`` tokens, drawn from the dense model.

    Raises:
        ValueError: a count out of range, or a model without a chat template.
    """
    wanted = list(prompts(count))
    out.mkdir(parents=True, exist_ok=True)
    worker = Worker(
        lambda: Engine(model, mode="dense", parallel=SEQUENCES, context_length=tokens + 256),
        max_waiting=count,
    )
    worker.start()
    if not worker.wait_ready():
        raise worker.error or ValueError(f"{model} was not loaded")
    try:
        configs = [
            GenerationConfig(max_tokens=tokens, temperature=temperature, top_k=0, min_p=0.0, seed=seed + i)
            for i in range(count)
        ]
        tickets = worker.submit(
            [_request(worker.engine, text, config) for (_, text), config in zip(wanted, configs, strict=True)]
        )
        for (name, _), ticket in zip(tqdm(wanted, desc="texts", file=sys.stderr), tickets, strict=True):
            text = "".join(chunk.text for chunk in ticket)
            (out / name).write_text(text + "\n", encoding="utf-8")
    finally:
        worker.close(finish=False)


def _request(engine: Engine, text: str, config: GenerationConfig) -> Request:
    tokenizer = engine.tokenizer
    prompt = render_chat(
        engine.chat_template,
        [{"role": "user", "content": text}],
        bos=tokenizer.token_text(tokenizer.bos_id),
        eos=tokenizer.token_text(next(iter(tokenizer.eos_ids), None)),
    )
    return Request(prompt_ids=tuple(tokenizer.encode(prompt)), config=config)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="registered name, path or Hugging Face id of a chat model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--texts", type=int, default=240, help="files")
    parser.add_argument("--tokens", type=int, default=600, help="the most tokens of a file")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="of a small model, above it words dissolve"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first text; the next has the next")
    args = parser.parse_args(argv)
    try:
        write_texts(
            args.model,
            args.out,
            count=args.texts,
            tokens=args.tokens,
            temperature=args.temperature,
            seed=args.seed,
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
