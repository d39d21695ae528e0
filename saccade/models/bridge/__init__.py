"""The bridge to Transformers (vLLM: model_impl="transformers"): any other model, over our attention.

entrance     the model's own code up to its decoder: embeddings of text, and of an image
attention    what Transformers' layers call: our paged attention, with the rule of each layer
model        both together, as the engine sees a model
proof        before it serves: our logits are those of its own forward
own_decoder  in place of its layers, where they are of our kinds: a decoder of ours, after the same proof
"""
