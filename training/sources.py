"""Text that every Python installation has: source code, reference prose and JSON, as named documents."""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import os
import random
import sysconfig
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

KINDS = ("prose", "code", "json")
CHUNK_CHARS = 3000
_SKIPPED = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"),
    *("pydoc_data", "encodings"),  # data more than code
}
_CODE_SUFFIXES = {".py", ".c", ".h", ".cc", ".cpp", ".rs", ".go", ".js", ".ts", ".java", ".sh", ".pl", ".sql"}
_JSON_SUFFIXES = {".json", ".jsonl", ".ndjson", ".geojson"}


@dataclass(frozen=True)
class Document:
    """A piece of text.

    Attributes:
        name: stable over machines, such as ``lib/json/decoder.py#2``.
        kind: one of ``KINDS``.
        group: documents of one group always fall into the same split.
        text: the text.
    """

    name: str
    kind: str
    group: str
    text: str


def order_key(name: str) -> bytes:
    """Return what sorts and splits names: as good as random, and the same everywhere."""
    return hashlib.sha256(name.encode()).digest()


def chunks(text: str, size: int = CHUNK_CHARS) -> Iterator[str]:
    """Cut a text at line ends into pieces of at least ``size`` characters; a short rest is its own piece."""
    piece: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        length += len(line)
        if length >= size:
            yield "".join(piece)
            piece, length = [], 0
    if piece:
        yield "".join(piece)


def builtin_documents() -> list[Document]:
    """Return the documents of this Python installation, of all kinds, in a fixed order."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = _library_files(stdlib)
    return [*_code(files), *_prose(files, stdlib), *_json(files)]


def user_documents(paths: list[Path]) -> list[Document]:
    """Read text files; the name's ending decides the kind (code, JSON, else prose).

    Raises:
        ValueError: a file is missing, empty, or not UTF-8.
    """
    result = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"cannot read text {path}: {reason}; give a UTF-8 text file") from None
        if not text.strip():
            raise ValueError(f"text {path} is empty: give a file with text")
        suffix = path.suffix.lower()
        kind = "code" if suffix in _CODE_SUFFIXES else "json" if suffix in _JSON_SUFFIXES else "prose"
        for index, piece in enumerate(chunks(text)):
            name = f"user/{path.name}#{index}"
            result.append(Document(name, kind, name, piece))
    return result


def _library_files(stdlib: Path) -> dict[str, str]:
    files = {}
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if _SKIPPED.isdisjoint(relative.parts) and not path.name.startswith("_sysconfigdata"):
            try:
                files[relative.as_posix()] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:  # a few files are in an older encoding
                continue
    return files


def _code(files: dict[str, str]) -> Iterator[Document]:
    for name, text in files.items():
        for index, piece in enumerate(chunks(text)):
            yield Document(f"lib/{name}#{index}", "code", f"lib/{name}", piece)


def _prose(files: dict[str, str], stdlib: Path) -> Iterator[Document]:
    from pydoc_data.topics import topics  # the language reference, as text

    texts = {f"topics/{topic}": text for topic, text in topics.items()}
    licence = stdlib / "LICENSE.txt"
    if licence.exists():
        texts["licence"] = licence.read_text(encoding="utf-8")
    for name, text in files.items():
        texts[f"docs/{name}"] = "\n\n".join(_docstrings(text))
    for name in sorted(texts):
        for index, piece in enumerate(chunks(sentences(texts[name]))):
            yield Document(f"{name}#{index}", "prose", name, piece)


def sentences(text: str) -> str:
    """Keep the paragraphs that read as prose: no examples, grammar or tables."""
    kept = []
    for paragraph in text.split("\n\n"):
        lines = [line.strip() for line in paragraph.strip().splitlines()]
        whole = "\n".join(lines)
        letters = sum(c.isalpha() or c.isspace() for c in whole)
        if len(whole) >= 40 and letters >= 0.9 * len(whole) and whole[-1] in ".:":
            kept.append(whole)
    return "\n\n".join(kept) + "\n" if kept else ""


def _docstrings(source: str, least_chars: int = 300) -> Iterator[str]:
    """Yield the long docstrings of a module."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds):
            doc = ast.get_docstring(node)
            if doc and len(doc) >= least_chars:
                yield doc


def _json(files: dict[str, str]) -> Iterator[Document]:
    for table, records in sorted(_tables(files).items()):
        indent = 2 if table.endswith("-indented") else None
        for index, piece in enumerate(_json_pieces(records, indent)):
            if index == 40:  # no table shall outweigh the others
                break
            yield Document(f"json/{table}#{index}", "json", f"json/{table}#{index}", piece)


def _json_pieces(records: list[Any], indent: int | None) -> Iterator[str]:
    batch: list[Any] = []
    length = 0
    for record in records:
        batch.append(record)
        length += len(json.dumps(record, indent=indent))
        if length >= CHUNK_CHARS:
            yield json.dumps(batch, indent=indent)
            batch, length = [], 0
    if batch:
        yield json.dumps(batch, indent=indent)


def _tables(files: dict[str, str]) -> dict[str, list[Any]]:
    import encodings.aliases
    import html.entities
    import http
    import locale
    import mimetypes

    modules = [_outline(name, text) for name, text in sorted(files.items(), key=lambda f: order_key(f[0]))]
    letters = [
        chr(code) for block in (0x20, 0x370, 0x400, 0x2190, 0x2200) for code in range(block, block + 96)
    ]
    return {
        "status-indented": [
            {"code": s.value, "name": s.name, "phrase": s.phrase, "description": s.description}
            for s in http.HTTPStatus
        ],
        "errors": [
            {"errno": code, "symbol": name, "message": os.strerror(code)}
            for code, name in sorted(errno.errorcode.items())
        ],
        "entities": [
            {"entity": f"&{name}", "characters": text, "codepoints": [ord(c) for c in text]}
            for name, text in html.entities.html5.items()
        ],
        "media-indented": [
            {"extension": ending, "contentType": kind, "compressible": kind.startswith("text/")}
            for ending, kind in mimetypes.types_map.items()
        ],
        "locales": [{"alias": key, "locale": value} for key, value in locale.locale_alias.items()],
        "encodings": [{"alias": key, "codec": value} for key, value in encodings.aliases.aliases.items()],
        "letters-indented": [_letter(letter) for letter in letters],
        "modules": modules,
        "modules-indented": modules[::-1],
        "readings": list(_readings()),
        "orders-indented": list(_orders()),
        "orders": list(_orders())[::-1],
    }


def _letter(letter: str) -> dict[str, Any]:
    return {
        "char": letter,
        "codepoint": f"U+{ord(letter):04X}",
        "name": unicodedata.name(letter, None),
        "category": unicodedata.category(letter),
        "bidirectional": unicodedata.bidirectional(letter),
        "numeric": unicodedata.numeric(letter, None),
        "mirrored": bool(unicodedata.mirrored(letter)),
    }


def _outline(name: str, source: str) -> dict[str, Any]:
    """Describe a module's public functions and classes, as an API index would."""
    functions, classes = [], []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = [a.arg for a in node.args.args]
            doc = (ast.get_docstring(node) or "").partition("\n")[0]
            functions.append(
                {"name": node.name, "line": node.lineno, "args": arguments, "summary": doc or None}
            )
        elif isinstance(node, ast.ClassDef):
            methods = [m.name for m in node.body if isinstance(m, ast.FunctionDef)]
            bases = [ast.unparse(base) for base in node.bases]
            classes.append({"name": node.name, "line": node.lineno, "bases": bases, "methods": methods[:8]})
    module = name.removesuffix(".py").replace("/", ".")
    return {"module": module, "path": name, "functions": functions[:6], "classes": classes[:4]}


def _readings() -> Iterator[dict[str, Any]]:
    draw = random.Random(1)
    time, value = datetime(2024, 3, 1, tzinfo=UTC), 20.0
    for _ in range(600):
        time += timedelta(seconds=draw.randrange(30, 900))
        value += draw.gauss(0, 0.4)
        sensor = draw.choice(["boiler", "hall", "roof", "cellar"])
        yield {
            "time": time.isoformat(),
            "sensor": sensor,
            "celsius": round(value, 2),
            "ok": draw.random() < 0.97,
        }


def _orders() -> Iterator[dict[str, Any]]:
    draw = random.Random(2)
    goods = ["notebook", "desk lamp", "USB cable", "coffee beans", "backpack", "wall clock", "garden hose"]
    places = ["Lisbon", "Oslo", "Toronto", "Nairobi", "Osaka", "Lima", "Dublin"]
    for number in range(400):
        items = [
            {
                "sku": f"A{draw.randrange(10**5):05d}",
                "title": draw.choice(goods),
                "quantity": draw.randrange(1, 5),
            }
            for _ in range(draw.randrange(1, 4))
        ]
        yield {
            "id": 70000 + number,
            "customer": {
                "id": draw.randrange(10**4),
                "city": draw.choice(places),
                "newsletter": draw.random() < 0.3,
            },
            "items": items,
            "total": round(draw.uniform(5, 400), 2),
            "status": draw.choice(["paid", "shipped", "returned", "cancelled"]),
            "note": None,
        }
