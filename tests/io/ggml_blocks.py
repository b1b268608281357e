"""Pack float rows into GGML's five and six bit and K blocks, plainly: what the gguf library cannot pack."""

import numpy as np

Array = np.ndarray


def _half(values: Array) -> Array:
    return values.astype("<f2")


def q5(values: Array, *, offset: bool) -> Array:
    """Pack to Q5_1 where ``offset``, else to Q5_0."""
    blocks = values.reshape(-1, 32)
    out = []
    for block in blocks:
        low = block.min() if offset else np.float32(0)
        scale = np.float32(
            _half(np.array([(block.max() - low) / 31 if offset else abs(block).max() / 15]))[0]
        )
        low = np.float32(_half(np.array([low]))[0])
        codes = np.rint((block - low) / scale).astype(int) + (0 if offset else 16)
        codes = np.clip(codes, 0, 31)
        high = sum(int(code >> 4) << i for i, code in enumerate(codes))
        nibbles = (codes[:16] & 15) | ((codes[16:] & 15) << 4)
        head = _half(np.array([scale, low] if offset else [scale])).tobytes()
        out.append(head + high.to_bytes(4, "little") + nibbles.astype(np.uint8).tobytes())
    return np.frombuffer(b"".join(out), np.uint8).reshape(*values.shape[:-1], -1)


def q4_k(values: Array) -> Array:
    """Pack to Q4_K: 8 parts of 32, each with a scale and a minimum of 6 bits."""
    out = []
    for block in values.reshape(-1, 8, 32):
        low = np.minimum(block.min(1), 0)
        span = block.max(1) - low
        d, dmin = np.float16(span.max() / 15 / 63), np.float16(max(-low.min() / 63, 1e-6))
        scales = np.clip(np.rint(span / 15 / np.float32(d)), 1, 63).astype(int)
        mins = np.clip(np.rint(-low / np.float32(dmin)), 0, 63).astype(int)
        step, base = np.float32(d) * scales, np.float32(dmin) * mins
        codes = np.clip(np.rint((block + base[:, None]) / step[:, None]), 0, 15).astype(np.uint8)
        packed = [0] * 12
        for j in range(8):
            if j < 4:
                packed[j] |= scales[j]
                packed[j + 4] |= mins[j]
            else:
                packed[j + 4] |= (scales[j] & 15) | ((mins[j] & 15) << 4)
                packed[j - 4] |= (scales[j] >> 4) << 6
                packed[j] |= (mins[j] >> 4) << 6
        nibbles = codes[0::2] | (codes[1::2] << 4)
        out.append(np.array([d, dmin], "<f2").tobytes() + bytes(packed) + nibbles.tobytes())
    return np.frombuffer(b"".join(out), np.uint8).reshape(*values.shape[:-1], -1)


def q6_k(values: Array) -> Array:
    """Pack to Q6_K: 16 parts of 16, each with a scale of 8 bits."""
    out = []
    for block in values.reshape(-1, 16, 16):
        largest = abs(block).max(1) / 31
        d = np.float16(largest.max() / 127)
        scales = np.clip(np.rint(largest / np.float32(d)), 1, 127).astype(np.int8)
        step = np.float32(d) * scales.astype(np.float32)
        codes = (np.clip(np.rint(block / step[:, None]), -32, 31) + 32).astype(np.uint8).reshape(2, 4, 32)
        low, high = [], []
        for half in codes:
            low += [(half[0] & 15) | ((half[2] & 15) << 4), (half[1] & 15) | ((half[3] & 15) << 4)]
            high.append(sum((half[i] >> 4) << (2 * i) for i in range(4)))
        parts = [*low, *high, scales.view(np.uint8)]
        out.append(b"".join(part.astype(np.uint8).tobytes() for part in parts) + d.tobytes())
    return np.frombuffer(b"".join(out), np.uint8).reshape(*values.shape[:-1], -1)


PACK = {
    "Q5_0": lambda values: q5(values, offset=False),
    "Q5_1": lambda values: q5(values, offset=True),
    "Q4_K": q4_k,
    "Q6_K": q6_k,
}
