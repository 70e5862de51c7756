"""QuantizeLinear and DequantizeLinear pairs: their nodes, types and opsets."""
