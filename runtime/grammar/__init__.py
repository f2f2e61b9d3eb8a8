"""Structured output: token masks from a JSON schema or a regular expression.

    grammars = load_grammars(model_dir, eos_token_ids)          None without a tokenizer or end-of-sequence tokens
    await grammars.check(grammar)                               rejects invalid and too expensive grammars
    text = grammars.open(grammar)                               a text without tokens yet
    job = text.ask(kept, token_ids); job.wait(deadline_s)       the masks of the tokens that may follow these
    unpacked(job.masks[()], vocab_size)                         [vocab_size] bool

The automata are llguidance's. Its calls cannot be interrupted: a schema of 10 KB may compile for
half a minute, and neither its fuel nor its other limits end that. Compiled grammars cannot move
between processes either. So no process of a cluster calls the library for a client's grammar.
**Each grammar has its own process**:

    fork server one per worker or router; has the tokenizer loaded, only forks (`fork_server`)
      └─ grammar    one per grammar: compiles it, then computes its masks (`child`, `library`)

The fork takes milliseconds at any size of the vocabulary. The kernel enforces each child's memory
limit, and its CPU time limit during compilation. A wait for a child (`process`) has a deadline and
a file descriptor to kill it by (`children`). A grammar that crashes the library, exhausts memory or
never ends affects no other process. The masks of different grammars are computed in parallel, on
other cores than the engine's thread.

Four checks run in this order:

 1. the size and shape of the text (`language`);
 2. cached rejections (`checking`);
 3. compilation with a short time limit and a long queue;
 4. compilation with a longer time limit and a short queue.

So a grammar that compiles slowly never delays those that compile fast.
"""

from runtime.grammar.checking import Grammars, load_grammars
from runtime.grammar.language import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from runtime.grammar.process import GuidedText, MaskJob, unpacked

__all__ = [
    "MAX_GRAMMAR_BYTES",
    "Grammar",
    "GrammarKind",
    "Grammars",
    "GuidedText",
    "MaskJob",
    "load_grammars",
    "unpacked",
]
