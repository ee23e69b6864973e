import numpy as np

from benchmarks.train.far import far_tokens
from benchmarks.train.vocabulary import encoded, pieces, train


def test_a_name_is_far_where_it_stands_before_and_nowhere_near():
    vocabulary = [b"read_rows", b" ", b"RowReader", b"rows", b".", b"_"]
    ids = [0, 1, 2, 4, 4, 3, 4, 4, 0, 4, 2, 4, 2, 4, 3]
    # read_rows stands 8 tokens after its last place; RowReader has another 2 after; rows is no name of several words.
    assert np.flatnonzero(far_tokens(np.array(ids), vocabulary, 5)).tolist() == [8]
    assert np.flatnonzero(far_tokens(np.array(ids), vocabulary, 8)).tolist() == []


def test_all_tokens_of_a_far_name_count_but_for_its_punctuation():
    vocabulary = [b" read", b"_", b"rows", b".", b"(", b"_max"]
    name = [0, 1, 2]
    ids = np.array([*name, 3, 3, 3, 3, 4, *name, 4])
    assert np.flatnonzero(far_tokens(ids, vocabulary, 6)).tolist() == [8, 10]
    longer = np.array([*name, 3, 3, 3, 3, 4, *name, 5])
    assert not far_tokens(longer, vocabulary, 6).any(), "read_rows_max is another name"


def test_pieces_are_the_bytes_of_the_text():
    text = "def läuft(row_reader):\n\treturn '\x00 ☃'\n"
    tokenizer = train([text * 3], 300)
    (ids,) = encoded(tokenizer, [text])
    known = pieces(tokenizer)
    assert ids.dtype == np.uint16 and len(ids) < len(text.encode())
    assert b"".join(known[token] for token in ids) == text.encode()
