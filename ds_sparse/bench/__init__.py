"""`ds_sparse bench`: what an operation costs beside its peers. Outputs are verified before anything is timed."""

OPERATIONS = {
    "matmul": "MatMul, Softmax, and attention of both",
    "attention": "fused attention on live blocks",
    "window": "products, softmax and attention of windows",
    "packed": "attention over packed documents, windows too",
    "selected": "attention of tokens that choose their blocks",
    "tokens": "attention over token pairs, step by step",
    "index": "what making an index costs",
}
"""Names and lines of help, in its order, which does without torch."""

IN_A_CLONE = {
    "bert": "a training step of BERT with sparse, dense and no attention",
    "modernbert": "a training step of ModernBERT on packed documents",
    "sequence": "a training step of BERT on several ranks, beside one",
    "train": "the quality that models reach, trained with sparse and dense attention",
}
"""Operations of `python -m benchmarks`, the program of a clone, which adds them to `OPERATIONS`."""


def command_of(operation: str) -> str:
    """The command that measures an operation."""
    return f"python -m benchmarks {operation}" if operation in IN_A_CLONE else f"ds_sparse bench {operation}"


def sentence_of_clone(operation: str) -> str:
    """Says which program measures, and shows, what the installed package does not."""
    return (
        f"{operation} compares models, by a program that is not installed: in a clone of ds_sparse run "
        f"`{command_of(operation)} ...`, with --help for its options; `python -m benchmarks show FILE` shows what it "
        "wrote."
    )
