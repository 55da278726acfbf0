"""The numerics lab: a low-precision run held against an FP32 run of the same data and initialisation, in memory."""
