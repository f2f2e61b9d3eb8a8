"""Options of `baton generate`, and the query that they describe."""

from pathlib import Path
from typing import Annotated

import typer

from baton.chat_options import Messages, TemplateArguments, Tools, read_options
from baton.command_line import AsJson, CommandOptions, TargetOption, Timeout
from baton.connection import ConnectionFlags, TlsCa, TlsCert, TlsKey, TlsName, TokenFile
from baton.generate_command import prompt_of, structured_output_of
from baton.values import Query, Sampling, Stop


class GenerateOptions(CommandOptions):
    """Options of `baton generate`."""

    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text, or with --ids token ids like 1,2,3. Without it, or with -: stdin.",
            show_default=False,
        ),
    ] = None
    target: TargetOption = None
    ids: Annotated[bool, typer.Option("--ids", help="The prompt is a list of token ids.")] = False
    as_chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat message.")] = (
        False
    )
    messages: Messages = None
    tools: Tools = None
    template_argument: TemplateArguments = None
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens to generate.")
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 takes the most likely token.")
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the smallest set of tokens with this total probability."),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Random seed; the same seed gives the same response.")
    ] = None
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; repeatable.")] = (
        None
    )
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the response must match.")
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole response must match.")
    ] = None
    num_choices: Annotated[
        int | None,
        typer.Option("--n", help="Number of responses to generate, shown when complete."),
    ] = None
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: logprobs of the tokens, with this number of alternatives."),
    ] = None
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="With --json: logprobs of the prompt's tokens, likewise.")
    ] = None
    model: Annotated[
        str,
        typer.Option(
            help="Reject the request unless this model is served. MODEL:ADAPTER, or the name of an "
            "adapter, answers with that adapter."
        ),
    ] = ""
    speculate: Annotated[
        bool | None,
        typer.Option(
            "--speculate/--no-speculate",
            help="Use speculative decoding if available; the response is the same.",
            show_default="yes",
        ),
    ] = None
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Use the prefix cache; the response is the same.",
            show_default="yes",
        ),
    ] = None
    cache_salt: Annotated[
        str, typer.Option(help="Share cached prompts only with requests that have the same salt.")
    ] = ""
    session: Annotated[
        str,
        typer.Option(
            help="The conversation that this is a turn of: caches keep its newest turn for longer."
        ),
    ] = ""
    retention_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds for which caches keep this prompt longer; default with --session: 300."
        ),
    ] = None
    end_session: Annotated[
        bool, typer.Option("--end-session", help="No turn of the session will follow.")
    ] = False
    timeout: Timeout = None
    as_json: AsJson = False
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_name: TlsName = ""
    token_file: TokenFile = None

    def connection(self) -> ConnectionFlags:
        """Return the flags that select credentials."""
        return ConnectionFlags(
            self.tls_ca, self.tls_cert, self.tls_key, self.tls_name, self.token_file
        )

    def query(self) -> Query:
        """Return the query to send; read its prompt, tools and schema.

        Raises:
            InvalidRequestError: the prompt is invalid.
            ConfigError: a file or stdin cannot be read.
        """
        options = read_options(self.tools, self.template_argument)
        return Query(
            prompt=prompt_of(self.prompt, self.messages, ids=self.ids, as_chat=self.as_chat),
            sampling=Sampling(
                temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed
            ),
            stop=Stop(max_tokens=self.max_tokens, strings=tuple(self.stop or ())),
            model=self.model,
            n=self.num_choices,
            num_top_logprobs=self.logprobs,
            num_prompt_logprobs=self.prompt_logprobs,
            speculate=self.speculate,
            structured_output=structured_output_of(self.json_schema, self.regex),
            prefix_cache=self.prefix_cache,
            cache_salt=self.cache_salt,
            session_id=self.session,
            retention_s=self.retention_s,
            ends_session=self.end_session,
            tools=options.tools,
            template_arguments=options.template_arguments,
        )
