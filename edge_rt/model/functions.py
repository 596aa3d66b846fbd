"""What each edge_rt op means, written in standard ONNX operators only.

decoder.onnx carries no definitions: an engine replaces the nodes by its own kernels. `attach`
adds these to a model so that ONNX's reference evaluator can run it.
"""

from __future__ import annotations

import onnx
from onnx import parser

DOMAIN = "edge_rt"
OPSET = 20

_HEADER = f'<domain: "{DOMAIN}", opset_import: ["": {OPSET}, "{DOMAIN}": 1]>\n'

# y = post_scale * act(x W^T + x[idx] Ws^T + bias). W comes from INT4 levels: (q - zero) * scale.
# Outputs from number gelu_from on pass through GELU; -1: none does. idx is -1 where it is padded;
# w_salient is zero there, and a kernel must not read x[-1].
W4_LINEAR = """
W4Linear <gelu_from> (x, qweight, scales, zeros, w_salient, idx, bias, post_scale) => (y) {
  low_mask = Constant <value = uint8 {15}> ()
  four = Constant <value = uint8 {4}> ()
  last = Constant <value_ints = [-1]> ()
  first = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  low = BitwiseAnd (qweight, low_mask)
  high = BitShift <direction = "RIGHT"> (qweight, four)
  low_column = Unsqueeze (low, last)
  high_column = Unsqueeze (high, last)
  pairs = Concat <axis = -1> (low_column, high_column)
  rows_groups = Shape (scales)
  grouped = Concat <axis = 0> (rows_groups, last)
  levels = Reshape (pairs, grouped)
  levels_float = Cast <to = 1> (levels)
  zero_column = Unsqueeze (zeros, last)
  zero_float = Cast <to = 1> (zero_column)
  scale_column = Unsqueeze (scales, last)
  scale_float = Cast <to = 1> (scale_column)
  centred = Sub (levels_float, zero_float)
  scaled = Mul (centred, scale_float)
  rows = Shape <start = 0, end = 1> (scales)
  flat_shape = Concat <axis = 0> (rows, last)
  flat = Reshape (scaled, flat_shape)
  inputs = Shape <start = -1> (x)
  weight = Slice (flat, first, inputs, one)
  weight_t = Transpose <perm = [1, 0]> (weight)
  main = MatMul (x, weight_t)
  x_salient = Gather <axis = -1> (x, idx)
  salient_float = Cast <to = 1> (w_salient)
  salient_t = Transpose <perm = [1, 0]> (salient_float)
  tail = MatMul (x_salient, salient_t)
  products = Add (main, tail)
  linear = Add (products, bias)
  activated = edge_rt.GeluTanh (linear)
  from = Constant <value_int: int = @gelu_from> ()
  zero = Constant <value_int = 0> ()
  step = Constant <value_int = 1> ()
  rows_scalar = Squeeze (rows)
  column = Range (zero, rows_scalar, step)
  wanted = GreaterOrEqual (from, zero)
  reached = GreaterOrEqual (column, from)
  through = And (wanted, reached)
  chosen = Where (through, activated, linear)
  y = Mul (chosen, post_scale)
}
"""

# The tanh form of GELU, spelled out: the reference evaluator cannot expand Gelu inside a function.
GELU_TANH = """
GeluTanh (x) => (y) {
  root = Constant <value = float {0.7978845608}> ()
  cubic = Constant <value = float {0.044715}> ()
  half = Constant <value = float {0.5}> ()
  one = Constant <value = float {1.0}> ()
  square = Mul (x, x)
  cube = Mul (square, x)
  bend = Mul (cubic, cube)
  bent = Add (x, bend)
  inner = Mul (root, bent)
  squashed = Tanh (inner)
  raised = Add (one, squashed)
  half_x = Mul (half, x)
  y = Mul (half_x, raised)
}
"""

# The pairs (2i, 2i+1) of the first elements of each head turn by the angle of their position.
# x [batch, tokens, heads, head], cos and sin [batch, tokens, rotary / 2].
ROTATE = """
Rotate (x, cos, sin) => (y) {
  axis_heads = Constant <value_ints = [2]> ()
  last = Constant <value_ints = [-1]> ()
  first = Constant <value_ints = [0]> ()
  second = Constant <value_ints = [1]> ()
  two = Constant <value_ints = [2]> ()
  end = Constant <value_ints = [9223372036854775807]> ()
  half = Shape <start = -1> (cos)
  rotary = Mul (half, two)
  turning = Slice (x, first, rotary, last)
  passing = Slice (x, rotary, end, last)
  even = Slice (turning, first, end, last, two)
  odd = Slice (turning, second, end, last, two)
  c = Unsqueeze (cos, axis_heads)
  s = Unsqueeze (sin, axis_heads)
  even_c = Mul (even, c)
  odd_s = Mul (odd, s)
  odd_c = Mul (odd, c)
  even_s = Mul (even, s)
  new_even = Sub (even_c, odd_s)
  new_odd = Add (odd_c, even_s)
  even_column = Unsqueeze (new_even, last)
  odd_column = Unsqueeze (new_odd, last)
  pairs = Concat <axis = -1> (even_column, odd_column)
  shape = Shape (turning)
  turned = Reshape (pairs, shape)
  y = Concat <axis = -1> (turned, passing)
}
"""

# qkv [batch, tokens, 3 heads head]; caches [batch, heads, capacity, head]; past_lens [batch]: how
# many positions of each row's cache are filled; cos and sin [positions, rotary / 2]. The new keys
# (rotated) and values are appended at past_lens, and each token attends to all up to itself.
ROPE_ATTENTION = """
RopeAttention <num_heads> (qkv, k_cache, v_cache, past_lens, cos, sin) => (y, k_out, v_out) {
  last = Constant <value_ints = [-1]> ()
  first = Constant <value_ints = [0]> ()
  second = Constant <value_ints = [1]> ()
  zero = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  heads = Constant <value_int: int = @num_heads> ()
  heads_1d = Unsqueeze (heads, first)
  batch_tokens = Shape <start = 0, end = 2> (qkv)
  batch_1d = Shape <start = 0, end = 1> (qkv)
  tokens_1d = Shape <start = 1, end = 2> (qkv)
  batch = Squeeze (batch_1d)
  tokens = Squeeze (tokens_1d)
  per_head = Concat <axis = 0> (batch_tokens, heads_1d, last)
  q, k, v = Split <axis = -1, num_outputs = 3> (qkv)
  q_heads = Reshape (q, per_head)
  k_heads = Reshape (k, per_head)
  v_heads = Reshape (v, per_head)
  past = Cast <to = 7> (past_lens)
  past_column = Unsqueeze (past, last)
  steps = Range (zero, tokens, one)
  positions = Add (past_column, steps)
  c = Gather <axis = 0> (cos, positions)
  s = Gather <axis = 0> (sin, positions)
  q_turned = edge_rt.Rotate (q_heads, c, s)
  k_turned = edge_rt.Rotate (k_heads, c, s)

  rows = Range (zero, batch, one)
  rows_column = Unsqueeze (rows, second)
  rows_wide = Expand (rows_column, batch_tokens)
  rows_index = Unsqueeze (rows_wide, last)
  positions_index = Unsqueeze (positions, last)
  where_to = Concat <axis = -1> (rows_index, positions_index)
  k_by_position = Transpose <perm = [0, 2, 1, 3]> (k_cache)
  v_by_position = Transpose <perm = [0, 2, 1, 3]> (v_cache)
  k_filled = ScatterND (k_by_position, where_to, k_turned)
  v_filled = ScatterND (v_by_position, where_to, v_heads)
  k_out = Transpose <perm = [0, 2, 1, 3]> (k_filled)
  v_out = Transpose <perm = [0, 2, 1, 3]> (v_filled)

  q_by_head = Transpose <perm = [0, 2, 1, 3]> (q_turned)
  keys = Transpose <perm = [0, 2, 3, 1]> (k_filled)
  products = MatMul (q_by_head, keys)
  head_1d = Shape <start = -1> (q_heads)
  head_float = Cast <to = 1> (head_1d)
  root = Sqrt (head_float)
  scores = Div (products, root)
  capacity_1d = Shape <start = 2, end = 3> (k_cache)
  capacity = Squeeze (capacity_1d)
  slots = Range (zero, capacity, one)
  position_column = Unsqueeze (positions, last)
  seen = LessOrEqual (slots, position_column)
  seen_by_head = Unsqueeze (seen, second)
  hidden = Constant <value = float {-3.0e38}> ()
  masked = Where (seen_by_head, scores, hidden)
  weights = Softmax <axis = -1> (masked)
  mixed = MatMul (weights, v_out)
  by_token = Transpose <perm = [0, 2, 1, 3]> (mixed)
  flat = Concat <axis = 0> (batch_tokens, last)
  y = Reshape (by_token, flat)
}
"""

# Logits of x [rows, width] over the vocabulary; weight [vocab, width] in FP16.
HEAD_LOGITS = """
HeadLogits (x, weight, bias) => (logits) {
  weight_float = Cast <to = 1> (weight)
  weight_t = Transpose <perm = [1, 0]> (weight_float)
  products = MatMul (x, weight_t)
  logits = Add (products, bias)
}
"""

TEXTS = (GELU_TANH, W4_LINEAR, ROTATE, ROPE_ATTENTION, HEAD_LOGITS)


def attach(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of `model` that defines every edge_rt op."""
    # Shapes let the evaluator expand the standard operators that need them, such as Gelu.
    defined = onnx.shape_inference.infer_shapes(model)
    defined.functions.extend(parser.parse_function(_HEADER + text.lstrip()) for text in TEXTS)
    return defined
