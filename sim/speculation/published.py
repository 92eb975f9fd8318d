"""Published acceptance: mean tokens per step by number of draft tokens, for drafters people deploy.

Source: InferenceX, `golden_al_distribution` (SPEED-Bench coding at temperature 1). A length counts the token
that needs no draft token.
"""

from __future__ import annotations

PUBLISHED: dict[str, dict[int, float]] = {
    "glm-5.2-mtp": {3: 2.99},
    "deepseek-v4-pro-dspark": {
        1: 1.84,
        2: 2.51,
        3: 3.01,
        4: 3.36,
        5: 3.61,
        6: 3.77,
        7: 3.73,
        8: 3.47,
    },
}
