"""Train a small SentencePiece BPE vocabulary; write it as JSON, with ids of some texts, and as its own file.

Run where sentencepiece is installed: ``python make_sentencepiece_case.py sentencepiece.json``.
"""

import io
import json
import random
import sys
from pathlib import Path
from pydoc_data import topics

import sentencepiece

TEXTS = [
    "",
    " ",
    "a",
    "The value of the expression is evaluated.",
    "  two  spaces,   three",
    "trailing space ",
    "line\nbreak\ttab\r\n",
    "Numbers 0 12 345 6789 3.14159",
    "Über größe naïve café",
    "你好，世界",
    "emoji 🙂 and 🦜🦜",
    "def f(x):\n    return x ** 2  # comment\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\u2581 escaped \u2581\u2581space",
    "<s> is no control token in a text",
    "<0x41> is no byte",
]


def main(path: Path) -> None:
    """Write the case to ``path``."""
    corpus = "\n".join(topics.topics[key] for key in sorted(topics.topics))[:200_000].splitlines()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus + ["Über größe naïve"] * 9),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=0.9999,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    rng = random.Random(1)
    alphabet = "abcdefgh   \n.,ÜßABC012é你🙂"
    texts = TEXTS + ["".join(rng.choices(alphabet, k=rng.randint(1, 40))) for _ in range(60)]
    texts += [" ".join(rng.choices(corpus, k=2))[:200] for _ in range(60)]
    count = tokenizer.get_piece_size()
    kinds = [
        2 if tokenizer.is_unknown(i) else 3 if tokenizer.is_control(i) else 6 if tokenizer.is_byte(i) else 1
        for i in range(count)
    ]
    case = {
        "tokens": [tokenizer.id_to_piece(i) for i in range(count)],
        "scores": [tokenizer.get_score(i) for i in range(count)],
        "types": kinds,
        "cases": [{"text": text, "ids": tokenizer.encode(text)} for text in texts],
    }
    path.with_suffix(".model").write_bytes(model.getvalue())
    path.write_text(json.dumps(case, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
