"""The rows in which numbers of sampling reach a device: by name here, by index on the device. Needs no Triton."""

PARAMETERS = ("temperature", "top_k", "top_p", "min_p")  # of `SamplingParams`, in this order
TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORM = range(5)  # top_k: N or more for all; uniform: a number in [0, 1)
COUNT = UNIFORM + 1
