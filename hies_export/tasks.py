"""The tasks a recipe may name."""

from __future__ import annotations

TASKS = ("text-classification", "image-classification", "text-generation", "image-text-to-text")
# The tasks whose output is text, token by token.
GENERATIVE = TASKS[2:]

AUTO_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
    "text-generation": "AutoModelForCausalLM",
    "image-text-to-text": "AutoModelForImageTextToText",
}
