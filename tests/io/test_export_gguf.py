"""GGUF exports: every family back through our reader, q and k as llama.cpp has them, tokenizers, our own keys."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from kairox_jax import load_model
from kairox_jax.io import Checkpoint, Sparsity, fingerprint, open_checkpoint
from kairox_jax.io.convert import Conversion, convert
from kairox_jax.io.gguf_file import GgufFile
from kairox_jax.io.sentencepiece_file import read_sentencepiece
from kairox_jax.models import find_sparsity

MODELS = Path(__file__).parents[1] / "data/models"
FAMILIES = sorted(path.parent.name for path in MODELS.glob("*/expected.npz"))
SERIAL_FALCON = "falcon-serial-bias"  # no GGUF architecture has its blocks
# What a file states in other words: names, float32 numbers, the tokenizer that the tiny cases lack.
RESTATED = {"family", "norm_eps", "rope_scaling", "bos_id", "eos_ids"}
FLOAT16_ERROR = 2e-3  # of the largest |logit|


def export(source: Path | Checkpoint, target: Path, **settings: Any) -> Checkpoint:
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    job = Conversion(source=checkpoint, target=target, kind="gguf", **settings)
    convert(job, note=lambda line: pytest.fail(line), report=lambda written, total: None)
    return open_checkpoint(target)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {SERIAL_FALCON}))
def test_every_family_comes_back(name: str, tmp_path: Path) -> None:
    source = open_checkpoint(MODELS / name)
    result = export(source, tmp_path / "out.gguf")
    assert set(result.names()) == set(source.names())
    for weight in source.names():
        np.testing.assert_array_equal(result.tensor(weight), source.tensor(weight))
    ours, theirs = dataclasses.asdict(result.config), dataclasses.asdict(source.config)
    assert {key for key in ours if ours[key] != theirs[key]} <= RESTATED
    assert result.config.norm_eps == pytest.approx(source.config.norm_eps, rel=1e-6)
    inv_freq = source.config.rope_theta ** (-np.arange(source.config.head_dim // 2) / 8)
    scaled = [c.rope_scaling.scale(inv_freq) for c in (result.config, source.config) if c.rope_scaling]
    if scaled and source.config.rope_scaling is not None and source.config.rope_scaling.kind == "linear":
        np.testing.assert_allclose(*scaled, rtol=1e-6)


@pytest.mark.parametrize("name", ["relu-llama", "llama3-rope", "opt", "relu-falcon", "sparse-qwen2"])
def test_float16_logits(name: str, tmp_path: Path) -> None:
    export(MODELS / name, tmp_path / "out.gguf", quantize="f16")
    with np.load(MODELS / name / "expected.npz") as file:
        ids, want = file["input_ids"], file["logits"]
    got = np.asarray(load_model(tmp_path / "out.gguf")(jnp.asarray(ids)))
    assert np.abs(got - want).max() <= FLOAT16_ERROR * np.abs(want).max()


@pytest.mark.parametrize("fmt", ["q8_0", "q4_0"])
def test_quantised_as_the_library_does(fmt: str, tmp_path: Path) -> None:
    source = open_checkpoint(MODELS / "relu-llama")
    export(source, tmp_path / "out.gguf", quantize=fmt)
    file, kind = GgufFile(tmp_path / "out.gguf"), gguf.GGMLQuantizationType[fmt.upper()]
    for ours, theirs, wanted in (
        ("layers.1.w_up", "blk.1.ffn_up.weight", kind),
        ("layers.1.w_down", "blk.1.ffn_down.weight", kind),
        ("embed", "token_embd.weight", gguf.GGMLQuantizationType.Q8_0),
    ):
        values = source.tensor(ours).T if ours.endswith("w_down") else source.tensor(ours)
        raw, found = file.raw(theirs)
        assert found == wanted.name.lower()
        np.testing.assert_array_equal(raw, gguf.quants.quantize(np.ascontiguousarray(values), wanted))


def test_q_and_k_are_permuted_as_in_llama_cpp(tmp_path: Path) -> None:
    source = open_checkpoint(MODELS / "relu-llama")
    config = source.config
    export(source, tmp_path / "out.gguf")
    file = GgufFile(tmp_path / "out.gguf")
    for name, theirs, heads in (("wq", "attn_q", config.num_heads), ("wk", "attn_k", config.num_kv_heads)):
        values = source.tensor(f"layers.0.{name}")
        # LlamaModel.permute of llama.cpp's converter
        want = (
            values.reshape(heads, 2, values.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
        )
        raw, _ = file.raw(f"blk.0.{theirs}.weight")
        np.testing.assert_array_equal(np.ascontiguousarray(raw).view(np.float32), want)


def test_what_no_architecture_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="serial blocks has no GGUF architecture: convert it to Orbax"):
        export(MODELS / SERIAL_FALCON, tmp_path / "out.gguf")
    assert not list(tmp_path.iterdir())


def test_any_format_of_a_file_is_kept(write_llama: Callable[..., Path], tmp_path: Path) -> None:
    names = ["blk.0.ffn_up.weight", "blk.0.ffn_down.weight", "blk.0.attn_q.weight"]
    kinds = [gguf.GGMLQuantizationType[name] for name in ("Q5_0", "Q4_1", "Q5_1")]
    source = open_checkpoint(write_llama(types=dict(zip(names, kinds, strict=True))))
    export(source, tmp_path / "out.gguf")
    before, after = GgufFile(source.path), GgufFile(tmp_path / "out.gguf")
    for name in before.shapes:
        assert after.tensors[name].format == before.tensors[name].format
        np.testing.assert_array_equal(after.raw(name)[0], before.raw(name)[0])


def test_an_orbax_folder_becomes_a_gguf_file(write_llama: Callable[..., Path], tmp_path: Path) -> None:
    source = open_checkpoint(write_llama())
    job = Conversion(source=source, target=tmp_path / "folder", quantize="q8_0")
    convert(job, note=pytest.fail, report=lambda written, total: None)
    middle = open_checkpoint(tmp_path / "folder")
    result = export(middle, tmp_path / "out.gguf")
    for name in middle.names():
        np.testing.assert_array_equal(result.tensor(name), middle.tensor(name))
    assert result.tokenizer().encode("hell 12 <|im_end|>") == source.tokenizer().encode("hell 12 <|im_end|>")
    assert result.chat_template == source.chat_template


def test_thresholds_profile_and_predictors_ride_along(tmp_path: Path) -> None:
    source = open_checkpoint(MODELS / "llama3-rope")
    layers, neurons = source.config.num_layers, source.config.num_neurons
    meta = {"fingerprint": fingerprint(source), "num_neurons": neurons, "model": "tiny"}
    frequency = (np.arange(layers * neurons).reshape(layers, neurons) % 64 / 64).astype(np.float32)
    given = Sparsity(np.linspace(0.1, 0.3, layers, dtype=np.float32), frequency, meta)
    (tmp_path / "predictors.safetensors").write_bytes(b"\x00\x01bytes")
    result = export(
        source, tmp_path / "out.gguf", sparsity=given, predictors=tmp_path / "predictors.safetensors"
    )
    found = find_sparsity(result, None)
    assert found is not None and found.frequency is not None and found.meta == meta
    np.testing.assert_array_equal(found.thresholds, given.thresholds)
    np.testing.assert_array_equal(found.frequency, frequency)
    fields = GgufFile(tmp_path / "out.gguf").fields
    assert fields["kairox.predictors"].tobytes() == b"\x00\x01bytes"
    assert fields["kairox.fingerprint"] == fingerprint(source)
    # llama.cpp refuses tensors that it does not know.
    assert not [name for name in GgufFile(tmp_path / "out.gguf").shapes if "kairox" in name]


SPACE = "\u2581"


def byte_level(kind: str) -> Engine:
    engine = Engine(models.BPE())
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if kind == "digits":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    engine.pre_tokenizer = pre_tokenizers.Sequence(steps)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    engine.train_from_iterator(["Hello world 123 hello wo o ol 99"] * 9, trainer)
    if kind == "unknown":
        engine.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split("l", behavior="isolated"), *steps]
        )
    return engine


def sentence_piece() -> Engine:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    for piece in [SPACE, *"Helowrdabx", "ll", SPACE + "w", "He", "llo", "Hello"]:
        vocab[piece] = len(vocab)
    merges = [("l", "l"), (SPACE, "w"), ("H", "e"), ("ll", "o"), ("He", "llo")]
    engine = Engine(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    escape = normalizers.Replace(" ", SPACE)
    engine.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape])
    engine.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    engine.add_special_tokens(["<unk>", "<s>", "</s>"])
    return engine


def with_tokenizer(folder: Path, engine: Engine, *, rows: int | None = None) -> Path:
    """A tiny llama folder whose embedding has a few more rows than the tokenizer has tokens."""
    from safetensors.numpy import load_file, save_file

    folder.mkdir()
    weights = load_file(MODELS / "relu-llama/model.safetensors")
    config = json.loads((MODELS / "relu-llama/config.json").read_text())
    rows = rows or engine.get_vocab_size() + 5
    for name, values in weights.items():
        if values.shape[0] == config["vocab_size"]:
            weights[name] = np.resize(values, (rows, *values.shape[1:]))
    config |= {"vocab_size": rows, "bos_token_id": 1, "eos_token_id": [2]}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": true, "chat_template": "{{ x }}"}')
    engine.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("engine", [byte_level("plain"), byte_level("digits"), sentence_piece()])
def test_tokenizers_of_folders(engine: Engine, tmp_path: Path) -> None:
    source = open_checkpoint(with_tokenizer(tmp_path / "source", engine))
    result = export(source, tmp_path / "out.gguf")
    ours, theirs = result.tokenizer(), source.tokenizer()
    for text in ("Hello world 1234", "  two\n\nlines\t", "na\u00efve \U0001f680", "<s>Hello</s>", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert (ours.bos_id, ours.eos_ids, ours.add_bos) == (theirs.bos_id, theirs.eos_ids, theirs.add_bos)
    assert result.chat_template == source.chat_template == "{{ x }}"
    assert ours.vocab_size == source.config.vocab_size


def test_sentencepieces_own_file(tmp_path: Path) -> None:
    pieces = read_sentencepiece(MODELS.parent / "sentencepiece.model").tokens
    folder = with_tokenizer(tmp_path / "source", byte_level("plain"), rows=len(pieces) + 3)
    (folder / "tokenizer.json").unlink()
    shutil.copyfile(MODELS.parent / "sentencepiece.model", folder / "tokenizer.model")
    source = open_checkpoint(folder)
    job = Conversion(source=source, target=tmp_path / "folder")
    convert(job, note=pytest.fail, report=lambda written, total: None)
    for result in (export(source, tmp_path / "out.gguf"), open_checkpoint(tmp_path / "folder")):
        for text in ("Hello world 12", "na\u00efve  \U0001f680"):
            assert result.tokenizer().encode(text) == source.tokenizer().encode(text)


def test_a_tokenizer_that_gguf_cannot_name(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path / "source", byte_level("unknown"))
    with pytest.raises(ValueError, match="GGUF has no name for the way this tokenizer cuts text"):
        export(source, tmp_path / "out.gguf")
