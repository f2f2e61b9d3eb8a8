"""Templates of published models, rendered as transformers renders them."""

import pytest

from router.text.chat_template import ChatTemplate
from runtime.errors import InvalidRequestError
from tests.support.texts.chats import CONVERSATIONS, SPECIAL_TOKENS, expected_rendering
from tests.support.texts.published import published_templates

pytestmark = pytest.mark.long  # they are fetched


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_each_renders_as_in_transformers(name: str) -> None:
    templates, chat = published_templates(), CONVERSATIONS[name].as_chat()
    assert len(templates) >= 40
    for model, source in templates.items():
        try:
            rendered: str | None = ChatTemplate(source, SPECIAL_TOKENS).render(chat)
        except InvalidRequestError:
            rendered = None
        assert rendered == expected_rendering(source, chat), model
