"""What is asked over a drawing but is not about it: whether it is a photo, and what one knows about the world."""

from __future__ import annotations

from random import Random

from training.samples import Question

OFF_TOPIC_KEYS = ("only",)  # what the answer to such a question is known by
_PHOTO = (
    "Is this a photo?",
    "Is this a photograph?",
    "Is it a photo?",
    "Is this a real photo?",
    "Is the picture a photo?",
)
_WORLD = (
    *("Who is the president of France?", "What is the capital of Italy?", "Tell me a joke.", "Write a poem."),
    *("Who won the game?", "How far is the moon?", "What is 12 times 7?", "Who wrote Hamlet?", "Explain gravity."),
    *("What is the weather today?", "Translate hello into German.", "Who are you in love with?", "Sing a song."),
    *("What year is it now?", "Write a Python program.", "Give me a recipe for soup.", "What is the news today?"),
)


def off_topic(rng: Random, skill: str) -> Question:
    if rng.random() < 0.5:
        return Question(skill, rng.choice(_PHOTO), "No, it is a drawing.", ("no", "drawing"), ("yes",))
    return Question(skill, rng.choice(_WORLD), "I can only answer questions about the picture.", OFF_TOPIC_KEYS)
