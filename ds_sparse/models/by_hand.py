"""What to write into attention that sparsify does not take."""

BY_HAND = """write sparse attention, on query, key and value (batch, heads, tokens, head size):
    structure = ds_sparse.FixedSparsityConfig(num_heads=heads, block=64)
    self.attention = ds_sparse.SparseSelfAttention(structure, max_seq_length=tokens)  # both in __init__
    context = self.attention.attend(query, key, value)  # in forward"""
