// The operator schemas, the only place that has them. Each device's library registers its kernels for these names.
//
// Letters: B batch, H heads, T tokens, b block size, R/C block rows/columns of a layout, L layout heads (1: shared by
// all heads, or H), N live blocks of the L layouts together, V = N * H / L live blocks of all heads.
//
// Sparse values are (B, V, b, b): the live blocks in (head, row, column) order, each row-major inside.
//
// Lists of live blocks, int32, as BlockIndex (index/block.py) builds them:
//   row_offsets (L*R + 1), columns (N)             block row i of layout head l owns entries row_offsets[l*R+i] to
//                                                  row_offsets[l*R+i+1]; entry n is the layout's n-th live block.
//   column_offsets (L*C + 1), rows (N), slots (N)  the same by columns; slots[e] is the entry number in row order.
// Head h reads layout head (L == 1 ? 0 : h), and its entry n is stored in values[:, (L == 1 ? h * N : 0) + n].
//
// Lists of live blocks in tiles, int32, as Tiles (index/tiles.py) has them. Lines are block rows (of row tiles) or
// block columns (of column tiles); r = max(1, tile / block) of them make a tile of `tile` tokens:
//   lines (tiles * r)   the tile's lines within their layout head, -1 where it is not filled; tiles are numbered
//                       through the layout heads, and each line of a head is in one tile
//   entries (E)         low 24 bits: a block on the other side; high 8 bits: which of the tile's lines are live there
//   units (U, 4)        a thread block's work: tile, first entry, number of entries, part (-1: the whole tile)
//                       bounded: made without waiting for counts; a last one (-1, the number of the others, 0, 0)
//                       comes behind, and those before it that are not needed are the same. Where first entry is -1,
//                       entries had no space: what the tile's lines give is NaN.
//   cuts (K, 3)         tiles that units cut: tile, first part, number of parts
//   slots (E, r)        where the tile's lines have the entry among the layout's N live blocks, -1 where they have not
//
// Lists of token pairs, int32, as TokenIndex (index/token.py) builds them, for query tokens T and key tokens S.
// There are P = list_batch * list_heads of them in (batch, head) order, list_batch 1 or B, list_heads 1 or H; sequence
// b and head h have list (list_batch == 1 ? 0 : b) * list_heads + (list_heads == 1 ? 0 : h). A pair may be there twice.
//   row_offsets (P*T + 1), columns (N)             query i of list p sees the keys at row_offsets[p*T+i] to
//                                                  row_offsets[p*T+i+1]
//   column_offsets (P*S + 1), rows (N), slots (N)  the same by keys; slots[e] is the entry number in row order
// A number for each pair is (R, N) with R = B*H / P: those of the r-th of the sequences and heads, in (batch, head)
// order, that share a list.
//
// implementation: the one that runs, as ds_sparse/dispatch has chosen: on a CPU "cpu", on a GPU "portable" or the
// name of a chip that has its own. What an operator has to be given for it is said there; what cannot run is refused.
//
// allow_tf32: products of fp32 on CUDA may round their operands to TF32; without it they have fp32's precision.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(ds_sparse, m) {
  // A layout (L, R, C), bool or uint8, any strides, as bits: uint8 (L, R, 4 * ceil(C / 32)), bit k of byte j is block
  // 8 * j + k.
  m.def("index_bits(Tensor layout) -> Tensor");

  // The bits of the blocks that block_indices (L, R, k) name for each block row, int32 or int64, in any order, perhaps
  // twice; those below 0, or beyond the columns, name none.
  m.def("index_bits_of_blocks(Tensor block_indices, SymInt columns) -> Tensor");

  // bits without the blocks above the diagonal.
  m.def("index_causal_bits(Tensor bits) -> Tensor");

  // The blocks of documents that are packed in one row, cu_seqlens (documents + 1) int32, ascending from 0 to tokens.
  // own: blocks are the documents' own, up to `most` of each, and those beyond the last have no tokens; else they are
  // those of the row, whose tokens see up to `most` others before and after.
  // -> spans int32 (2, blocks, 2): each block's first token and number of tokens, as below; then the first block, and
  // the one after the last, of which its tokens may see some; lost int32 (1), for index_fill: 1 where cu_seqlens is not
  // like that, which a CPU refuses
  m.def(
      "index_documents(Tensor cu_seqlens, SymInt tokens, SymInt blocks, int block, bool own, SymInt most) "
      "-> (Tensor spans, Tensor lost)");

  // bits of the blocks of packed documents, ranges int32 (N, 2) saying with which others each may be live, as above.
  // bits: of the layout that each document has from its own start (own), or of the row's, none: all is live; causal:
  // without those above the diagonal. -> uint8 (L, N, 4 * ceil(N / 32))
  m.def("index_bits_of_documents(Tensor? bits, Tensor ranges, bool own, bool causal) -> Tensor");

  // The first token, and the one after the last, that are in each token's document and at most windows[l] away.
  // cu_seqlens (documents + 1), which begins with 0 and ends with tokens, and windows (L), int32 -> int32 (L, tokens,
  // 2)
  m.def("index_limits(Tensor cu_seqlens, Tensor windows, SymInt tokens) -> Tensor");

  // spans int32 (N, 2) of the blocks that lines and then entries of tiles are, zeros where there is no such block.
  // -> int32 (lines + E, 2)
  m.def("index_tile_spans(Tensor spans, Tensor lines, Tensor entries) -> Tensor");

  // Which lines share a tile, for one or two heights of tiles, ascending, and how long their lists are; nothing waits.
  // bounded: long lists are cut into fewer parts, as there is space for so many alone. row_block: tokens of a block
  // row, where `block` is those of a column alone; rows keep their order then.
  // -> plan int32, for index_fill; counts int64, which begin as Header in csrc/index.h
  m.def(
      "index_plan(Tensor bits, SymInt columns, int block, int[] tiles, bool of_rows, bool of_columns, bool bounded, "
      "int? row_block=None) -> (Tensor plan, Tensor counts)");

  // The tiles of a plan: lines, entries, units and cuts of each height of the rows, then of the columns. layout_heads:
  // L, or 1 where all heads are equal. sizes: three for each, the numbers of its entries, units and cuts. If bounded it
  // is one number, the entries of each that there is space for; then units and cuts are as many as there may be, and
  // one unit more: all behind the last are (-1, their number, 0, 0). Where entries have no space, the tile's units have
  // none, from -1 on; so it is of all tiles where lost, int32 (1), is not 0.
  m.def(
      "index_fill(Tensor bits, Tensor plan, Tensor counts, SymInt columns, int block, int[] tiles, bool of_rows, "
      "bool of_columns, bool bounded, SymInt layout_heads, SymInt[] sizes, Tensor? lost=None, int? row_block=None) "
      "-> Tensor[]");

  // values[:, n] = a[h, rows of n] @ b[h, columns of n].   a (B, H, R*b, K), b (B, H, K, C*b), any strides
  // -> (B, V, b, b)
  // tile_...: for "hopper" the same blocks in tiles, all or none: of 64 rows for blocks of 16 and 32, of 128 for blocks
  // of 64 and 128.
  m.def(
      "matmul_sdd(Tensor a, Tensor b, Tensor row_offsets, Tensor columns, Tensor? tile_lines, Tensor? tile_entries, "
      "Tensor? tile_units, Tensor? tile_slots, int layout_heads, int block, bool allow_tf32, str implementation) "
      "-> Tensor");

  // S @ dense, or its transpose.   values (B, V, b, b) contiguous, dense (B, H, C*b, K) any strides
  // -> (B, H, R*b, K) contiguous, or with transpose_result (B, H, K, R*b) contiguous.
  // offsets, indices: row_offsets, columns for S; column_offsets, rows for S transposed, and then slots is given.
  // tile_...: as above, but all of 128 rows, or of 128 columns for S transposed.
  m.def(
      "matmul_dsd(Tensor values, Tensor dense, Tensor offsets, Tensor indices, Tensor? slots, Tensor? tile_lines, "
      "Tensor? tile_entries, Tensor? tile_units, Tensor? tile_cuts, Tensor? tile_slots, int layout_heads, int block, "
      "bool transpose_result, bool allow_tf32, str implementation) -> Tensor");

  // A contiguous copy of x (B, H, T, K), 16 bits a number, T and K multiples of 8, any strides; made for stride(2) 1,
  // where torch's own takes four times as long. Only on CUDA.
  m.def("transpose(Tensor x) -> Tensor");

  // Row softmax of scale * scores + rpe + masks over the live blocks.   scores (B, V, b, b) contiguous,
  // rpe and attn_mask (B or 1, H or 1, T or 1, S) any strides with T = R*b, S = C*b, key_padding_mask (B or 1, S);
  // bool masks keep where true, others have the dtype of scores and are added; causal drops columns after the row's
  // token. -> (B, V, b, b); rows with nothing left are zero.
  // strips (U, 4), up to `most` elements each: the units of Strips (index/strips.py), which CUDA walks.
  m.def(
      "softmax_forward(Tensor scores, Tensor? rpe, Tensor? key_padding_mask, Tensor? attn_mask, Tensor row_offsets, "
      "Tensor columns, Tensor? strips, int most, int layout_heads, int block, float scale, bool causal) -> Tensor");

  // scale * probs * (grad - sum over the row of grad * probs).   grad, probs (B, V, b, b) contiguous -> (B, V, b, b)
  m.def(
      "softmax_backward(Tensor grad, Tensor probs, Tensor row_offsets, Tensor columns, Tensor? strips, int most, "
      "int layout_heads, int block, float scale) -> Tensor");

  // Sum of values, zero outside the live blocks, over the dimensions that are 1 in shape = (B or 1, H or 1, T or 1, S);
  // added in fp64 in a fixed order, given in fp32 (fp64 for fp64): the gradient of what was added to the scores.
  m.def(
      "softmax_bias_backward(Tensor values, Tensor row_offsets, Tensor columns, int layout_heads, int heads, "
      "int block, SymInt[] shape) -> Tensor");

  // softmax(scale * query @ key^T + rpe + attn_mask + key_bias) @ value on the live blocks, the log of each row's sum
  // of exponentials, and what gives its probabilities again.   query (B, H, T, D), key and value (B, Hkv, S, D), H a
  // multiple of Hkv, D a multiple of 8 and adjacent in memory; rpe by distance (H or 1, 2 * M - 1), the number
  // M - 1 + j - i for query i and key j, or as attn_mask; attn_mask (B or 1, H or 1, T or 1, S), of
  // query's dtype or lse's, attn_mask also bool (keeps where true); key_bias (B or 1, S) of lse's dtype, on CUDA also
  // bool; causal drops keys after the row's token; dropout_seed int64 (2): seed and offset for dropout.h
  // -> output (B, H, T, D) in query's order of memory; lse (B, H, T) in fp32 (fp64 for fp64); rows (B, H, T, 2) like
  // it, contiguous: row_max, near or at a row's largest exponent, and row_sum, the sum of
  // exp(exponent - row_max), of which the backward passes make its probabilities: in lse, of both, a row_max such as
  // -10000 or -1e30 leaves little of the sum. A row with nothing left is zeros, its lse and row_max -inf. rows_differ:
  // the block rows of a tile have little in common, which on Hopper decides how they are walked. softcap: scaled scores
  // are softcap * tanh(score / softcap) before they are masked; 0: as they are. With masks alone: no rpe, attn_mask
  // bool, key_bias 0 or -inf.
  m.def(
      "block_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? rpe, Tensor? key_bias, "
      "Tensor? attn_mask, Tensor? dropout_seed, Tensor row_lines, Tensor row_entries, Tensor row_units, "
      "Tensor row_cuts, SymInt layout_heads, int block, int tile, float scale, bool causal, float dropout_p, "
      "str implementation, bool bounded=False, bool by_sequence=False, bool rows_differ=False, float softcap=0.0) "
      "-> (Tensor output, Tensor lse, Tensor rows)");

  // Gradients for query, key and value, in their orders of memory, from those of output and, perhaps, of lse.
  // Probabilities are exp(exponent - row_max) / row_sum, by the row's two numbers. With deterministic all sums are in
  // a fixed order, as they always are on the CPU; without, those of grad_query may be in any.
  m.def(
      "block_attention_backward(Tensor grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor output, Tensor rows, Tensor? rpe, Tensor? key_bias, Tensor? attn_mask, Tensor? dropout_seed, "
      "Tensor row_lines, Tensor row_entries, Tensor row_units, Tensor row_cuts, Tensor column_lines, "
      "Tensor column_entries, Tensor column_units, Tensor column_cuts, SymInt layout_heads, int block, int tile, "
      "float scale, bool causal, float dropout_p, bool deterministic, str implementation, bool bounded=False, "
      "bool by_sequence=False, float softcap=0.0) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)");

  // Sinks, a logit for each head in the denominators of its rows, added to what an operator of attention returned.
  // output (B, H, T, D), D adjacent in memory, rows as above and sinks (H); or, of queries that have chosen blocks of
  // keys, output (B, H, T, g, D), rows (B, H, T, g, 2) and sinks (H, g). rows and sinks in fp32 (fp64 for fp64),
  // contiguous -> output in its order of memory, lse and rows, with the sinks; a row with nothing else is zeros, its
  // lse and row_max the sink, its row_sum 0.
  m.def("attention_sinks_forward(Tensor output, Tensor rows, Tensor sinks) -> (Tensor, Tensor, Tensor)");

  // The gradient of sinks, like them, from those of output, any strides, and, perhaps, of lse, contiguous. output and
  // rows are those with the sinks. Sums are in a fixed order.
  m.def(
      "attention_sinks_backward(Tensor grad_output, Tensor? grad_lse, Tensor output, Tensor rows, Tensor sinks) "
      "-> Tensor");

  // block_attention_forward and block_attention_backward of documents that are packed in one row, on a Hopper GPU: the
  // layout is of the blocks of all documents, spans int32 (N, 2) says which token each begins with, and how many it
  // has; row_spans and column_spans, int32 (lines + E, 2), say so of the blocks that lines and then entries are. query
  // (1, H, T, D), key and value (1, Hkv, T, D), fp16 or bf16, D up to 128 -> output (1, H, T, D); lse (1, H, N * block)
  // and rows (1, H, N * block, 2), by aligned numbers of tokens (the block's number times block, and the token's place
  // in it), unset where there is none; and so is grad_lse. fits: bounded tiles are known to have space.
  m.def(
      "packed_attention_forward(Tensor query, Tensor key, Tensor value, Tensor spans, Tensor row_spans, "
      "Tensor row_lines, Tensor row_entries, Tensor row_units, Tensor row_cuts, int layout_heads, int block, "
      "float scale, bool causal, bool bounded=False, bool fits=False) "
      "-> (Tensor output, Tensor lse, Tensor rows)");
  m.def(
      "packed_attention_backward(Tensor grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor output, Tensor rows, Tensor spans, Tensor row_spans, Tensor column_spans, Tensor row_lines, "
      "Tensor row_entries, Tensor row_units, Tensor row_cuts, Tensor column_lines, Tensor column_entries, "
      "Tensor column_units, Tensor column_cuts, int layout_heads, int block, float scale, bool causal, "
      "bool deterministic, bool bounded=False, bool fits=False) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)");

  // The gradient of what was added to the scores, zero where nothing is live, summed over the dimensions that are 1 in
  // shape = (B or 1, H or 1, T, S) in a fixed order; in fp32 (fp64 for fp64).
  m.def(
      "block_attention_bias_backward(Tensor grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor output, Tensor rows, Tensor? rpe, Tensor? key_bias, Tensor? attn_mask, Tensor? dropout_seed, "
      "Tensor row_lines, Tensor row_entries, Tensor row_units, Tensor row_cuts, SymInt layout_heads, int block, "
      "int tile, float scale, bool causal, float dropout_p, SymInt[] shape, bool bounded=False, "
      "bool by_sequence=False) -> Tensor");

  // Windows: token t with the tokens t - w to t + w, w = window; bands (B, H, T, 2w + 1) hold what belongs to token
  // t - w + j in [..., t, j], and nothing where there is no such token.

  // band[t, j] = a[t] . b[t - w + j], 0 where there is no such token.   a and b (B, H, T, D), any strides
  // -> (B, H, T, 2w + 1) contiguous
  m.def("window_matmul(Tensor a, Tensor b, int window, str implementation) -> Tensor");

  // out[t] = sum over j of band[t, j] * dense[t - w + j]; transposed: sum over j of band[t - w + j, 2w - j] *
  // dense[t - w + j]. Band entries outside the sequence are never read.
  // band (B, H, T, 2w + 1) and dense (B, H, T, D), any strides -> (B, H, T, D) contiguous
  m.def("unwindow_matmul(Tensor band, Tensor dense, bool transposed) -> Tensor");

  // Row softmax of scale * band + key_bias over the tokens that there are, at most windows[h] <= w away, with causal
  // none after the row's; 0 elsewhere.   band contiguous, windows of 1 or H numbers, key_bias (B or 1, T) of lse's
  // dtype, its keys adjacent -> like band; rows with nothing left are zero.
  m.def("window_softmax_forward(Tensor band, Tensor? key_bias, int[] windows, float scale, bool causal) -> Tensor");

  // scale * probs * (grad - sum of grad * probs over the row).   grad and probs like band, contiguous -> like band
  m.def("window_softmax_backward(Tensor grad, Tensor probs, float scale) -> Tensor");

  // block_attention_forward where live blocks are limited token by token, T = S: token t sees tokens limits[t][0] to
  // limits[t][1] - 1, the first num_global tokens see all and are seen by all, and with causal none sees one with a
  // larger place. All of it is symmetric but for causal.   limits int32 (1 or H, T, 2); places int32 (1 or H, T), none:
  // the order of tokens; key_bias (B or 1, H or 1, 1, T) of lse's dtype, on CUDA also bool
  m.def(
      "window_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? key_bias, Tensor limits, "
      "Tensor? places, Tensor row_lines, Tensor row_entries, Tensor row_units, Tensor row_cuts, int layout_heads, "
      "int block, int tile, int num_global, float scale, bool causal, str implementation, bool bounded=False, "
      "float softcap=0.0) -> (Tensor output, Tensor lse, Tensor rows)");

  m.def(
      "window_attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output, "
      "Tensor rows, Tensor? key_bias, Tensor limits, Tensor? places, Tensor row_lines, Tensor row_entries, "
      "Tensor row_units, Tensor row_cuts, Tensor column_lines, Tensor column_entries, Tensor column_units, "
      "Tensor column_cuts, int layout_heads, int block, int tile, int num_global, float scale, bool causal, "
      "bool deterministic, str implementation, bool bounded=False, float softcap=0.0) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)");

  // values[r, n] = query[row of n] . key[column of n].   query (B, H, T, D), key (B, H, S, D), any strides -> (R, N)
  m.def(
      "token_matmul_sdd(Tensor query, Tensor key, Tensor row_offsets, Tensor columns, int list_batch, int list_heads) "
      "-> Tensor");

  // out[i] = the sum over line i's entries n of values[slot of n] * dense[index of n].   values (R, N), dense
  // (B, H, tokens, D), any strides -> (B, H, lines, D) contiguous. offsets, indices: row_offsets, columns; or
  // column_offsets, rows, and then slots is given.
  m.def(
      "token_matmul_dsd(Tensor values, Tensor dense, Tensor offsets, Tensor indices, Tensor? slots, int list_batch, "
      "int list_heads) -> Tensor");

  // softmax(scale * query @ key^T) @ value over the pairs, the log of each row's sum of exponentials, and what gives
  // its probabilities again.   query (B, H, T, D), key (B, H, S, D), value (B, H, S, E), any strides
  // -> output (B, H, T, E) contiguous; lse (B, H, T) in fp32 (fp64 for fp64); rows (B, H, T, 2) like it: row_max
  // and row_sum, the sum of exp(exponent - row_max). A row without a pair is zeros, its lse and row_max -inf.
  m.def(
      "token_attention_forward(Tensor query, Tensor key, Tensor value, Tensor row_offsets, Tensor columns, "
      "int list_batch, int list_heads, float scale) -> (Tensor output, Tensor lse, Tensor rows)");

  // token_attention_forward and token_attention_backward on a Hopper GPU, in tiles of 128 tokens and blocks of 64:
  // row_pairs and column_pairs, int32 (1 or H, E, 128, 2), have a bit for each pair of each entry
  // (index/token_tiles.py). query (B, H, T, D), key and value (B, H, S, D), fp16 or bf16, D a multiple of 8 up to
  // 128, adjacent in memory
  // -> as block_attention_forward and block_attention_backward.
  m.def(
      "token_tiles_forward(Tensor query, Tensor key, Tensor value, Tensor row_lines, Tensor row_entries, "
      "Tensor row_units, Tensor row_cuts, Tensor row_pairs, int layout_heads, float scale) "
      "-> (Tensor output, Tensor lse, Tensor rows)");
  m.def(
      "token_tiles_backward(Tensor grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor output, Tensor rows, Tensor row_lines, Tensor row_entries, Tensor row_units, Tensor row_cuts, "
      "Tensor row_pairs, Tensor column_lines, Tensor column_entries, Tensor column_units, Tensor column_cuts, "
      "Tensor column_pairs, int layout_heads, float scale, bool deterministic) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)");

  // softmax(scale * query @ key^T) @ value of queries that begin at a position, offset, or offsets (1 or B), int32 or
  // int64: query t of a sequence is at its offset + t, and sees the keys of its block row's live blocks, if causal
  // those up to its position.   query (B, H, T, D), key and value (B, Hkv, S, D), H a multiple of Hkv, D adjacent in
  // memory; bits uint8 (L, R, 4 * words) of a layout of at least S keys, L a divisor of H, none: all is live; keep bool
  // (B or 1, S), false for keys that nobody sees; sinks (H) of lse's dtype, a logit a head in the softmax's denominator
  // -> output (B, H, T, D) contiguous; lse (B, H, T) in fp32 (fp64 for fp64). A row that sees nothing is zeros, its lse
  // -inf or the sink; one of offsets beyond the layout is NaN on CUDA.
  m.def(
      "decode_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? bits, int block, Tensor? offsets, "
      "int offset, bool causal, Tensor? keep, Tensor? sinks, float scale) -> (Tensor output, Tensor lse)");

  // Attention of queries that have chosen blocks of keys for themselves: softmax(scale * query @ key^T + key_bias) @
  // value, where query t of a sequence, at its offset + t, sees the keys of the blocks in row t of bits, if causal
  // those up to its position.   query (B, Hq, T, g, D), g a power of two up to 16: g neighbouring heads that see the
  // same keys are the g rows of each token; key and value (B, Hkv, S, D), Hq a multiple of Hkv, D a multiple of 8 and
  // adjacent in memory; key_bias as above; bits uint8 (L or B * L, T, 4 * words) of at least S keys, L a divisor of Hq
  // (bits_heads); offsets int32 or int64 (1 or B), none: all are `offset`.
  // row_..., on a GPU: tiles of rows, of blocks of 16 rows, 16 / g tokens each, rows being counted t * g + i; none,
  // where g is 1, block 64 or more and all begin at position 0: rows of queries are gathered by the block that they
  // have chosen, at most `most` of each token, and fewer than 2^22 of a head.
  // -> output as query, in its order of memory; lse (B, Hq, T, g) and rows (B, Hq, T, g, 2), contiguous, as of
  // block_attention_forward.
  m.def(
      "selected_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? key_bias, Tensor bits, "
      "Tensor? offsets, SymInt offset, Tensor? row_lines, Tensor? row_entries, Tensor? row_units, Tensor? row_cuts, "
      "int bits_heads, SymInt most, int block, int tile, float scale, bool causal, str implementation) "
      "-> (Tensor output, Tensor lse, Tensor rows)");

  // Gradients for query, key and value, in their orders of memory, from those of output and, perhaps, of lse, as of
  // block_attention_backward. column_...: tiles of keys, whose entries are blocks of 16 rows.
  m.def(
      "selected_attention_backward(Tensor grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor output, Tensor rows, Tensor? key_bias, Tensor bits, Tensor? offsets, SymInt offset, Tensor? row_lines, "
      "Tensor? row_entries, Tensor? row_units, Tensor? row_cuts, Tensor? column_lines, Tensor? column_entries, "
      "Tensor? column_units, Tensor? column_cuts, int bits_heads, SymInt most, int block, int tile, float scale, "
      "bool causal, bool deterministic, str implementation) -> (Tensor grad_query, Tensor grad_key, Tensor "
      "grad_value)");

  // The largest product of each query with a key that it sees of each of the first C blocks of `block` keys, a multiple
  // of 8; -inf where it sees none. query (B, H, T, D), key (B, Hkv, S, D), fp16 or bf16, H a multiple of Hkv, D a
  // multiple of 8 up to 256, adjacent in memory, each token at a multiple of 16 bytes; keep bool (B or 1, S): the keys
  // that are there; positions int64 (B or 1, T), none: from offset on; ranges as below: a query sees no key behind its
  // document, and what it has of blocks before that is any number; causal: nor beyond its position. Only on CUDA.
  // -> fp32 (B, H, T, C)
  m.def(
      "block_maxima(Tensor query, Tensor key, Tensor? keep, Tensor? positions, Tensor? ranges, int offset, "
      "int columns, int block, bool causal) -> Tensor");

  // The numbers of the k blocks that score highest for each row, of which `first` from the start, and `local` around
  // the row's, are chosen whatever they score: those before all, by number, then the best first, of equal ones the
  // lower one; -1 behind. Row i has query_block queries from first_position + i * query_block on, up to last_position,
  // or one at its position. NaN counts as infinity. k is 4096 at most. Only on CUDA.
  // scores (B, G, rows, C) fp32 contiguous. sizes (B or 1, C or more) fp32: scores are products with sums of so many
  // keys, and causal rows choose among blocks that are wholly behind them. counts (B or 1, rows, C) bool: the blocks
  // that count. first_key (B or 1, C or more) int64: where a block's first key is that is there, its begin if it is not
  // given. positions (B or 1, rows) int64. ranges (N, 2) int32, of packed documents: the first block of each block's
  // document, from which its numbers count, and the one after its last.
  // -> int32 (B, G, rows, k)
  m.def(
      "choose_blocks(Tensor scores, Tensor? sizes, Tensor? counts, Tensor? first_key, Tensor? positions, "
      "Tensor? ranges, int first_position, int last_position, int query_block, int block, int k, int first, int local, "
      "bool causal) -> Tensor");

  // Gradients for query, key and value, contiguous, from those of output and, perhaps, of lse.
  m.def(
      "token_attention_backward(Tensor grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor output, Tensor rows, Tensor row_offsets, Tensor columns, Tensor column_offsets, Tensor column_rows, "
      "Tensor slots, int list_batch, int list_heads, float scale) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)");
}
