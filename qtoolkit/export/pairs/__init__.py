"""QuantizeLinear and DequantizeLinear: the form, the types and the opset of each pair."""
