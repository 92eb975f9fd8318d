"""Words on a page: what a user wrote is shown as it is, never read as markup."""

from __future__ import annotations

import re

_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+\-.!|~$:&^=@])")


def plain(text: object) -> str:
    """`text` for Streamlit's Markdown, shown letter by letter: no links, pictures, colours or HTML."""
    one_line = " ".join(str(text).split())
    return _MARKUP.sub(r"\\\1", "".join(char for char in one_line if char.isprintable()))
