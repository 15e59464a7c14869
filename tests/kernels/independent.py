"""Signs and rounding bits by the contract (section 1 of the method) in numpy; shares no code."""

import numpy as np

MASK = np.uint64(0xFFFFFFFF)


def philox(counter, key):
    """Philox4x32-10 (Salmon et al., SC 2011, section 3.3) on four arrays that broadcast."""
    x0, x1, x2, x3 = np.broadcast_arrays(*(np.asarray(c, np.uint64) for c in counter))
    k0, k1 = (np.uint64(k) for k in key)
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * x0, np.uint64(0xCD9E8D57) * x2
        x0, x1 = (right >> np.uint64(32)) ^ x1 ^ k0, right & MASK
        x2, x3 = (left >> np.uint64(32)) ^ x3 ^ k1, left & MASK
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & MASK, (k1 + np.uint64(0xBB67AE85)) & MASK
    return np.stack([x0, x1, x2, x3]).astype(np.int64)


def signs(key, rows, columns):
    """±1 [rows, columns]: counter (j, i // 128, 0, 1), bit i % 32 of word (i % 128) // 32."""
    i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(columns.start, columns.stop)[None]
    four = philox((j, i // 128, 0, 1), key)
    word = np.choose(i % 128 // 32, four)
    return np.where(word >> (i % 32) & 1, 1, -1)


def rounding_words(key, rows, rank):
    """Entry (row, c): output word c % 4 at counter (row, c // 4, 1, 1)."""
    row, c = np.arange(rows.start, rows.stop)[:, None], np.arange(rank)[None]
    return np.choose(c % 4, philox((row, c // 4, 1, 1), key))


def applied(weight, values, exponents, key, columns):
    """W − (values·2^e)·signs: integer sums, an exact product, one float32 subtraction."""
    total = values.astype(np.int64) @ signs(key, slice(0, values.shape[1]), columns)
    product = np.ldexp(total.astype(np.float64), exponents.astype(np.int64)[:, None])
    assert (product.astype(np.float32) == product).all()  # so the subtraction rounds alone
    return weight - product.astype(np.float32)
