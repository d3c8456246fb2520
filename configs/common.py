ATTENTION_DEFAULTS = {"softmax": {"dropout": 0.0}, "linear": {"chunk_size": 128}}
