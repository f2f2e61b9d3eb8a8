"""Output that follows a JSON schema or a regular expression: which tokens may come next.

    grammars = load_grammars(model_dir, eos_token_ids)          None without a tokenizer or end-of-sequence tokens
    await grammars.check(grammar)                               refuses what cannot work, or takes too long
    text = grammars.open(grammar)                               a text that has not begun
    job = text.ask(kept, token_ids); job.wait(deadline_s)       the masks of what may follow these tokens
    unpacked(job.masks[()], vocab_size)                         [vocab_size] bool

The automata are llguidance's, whose calls nothing can interrupt: a schema of 10 KB may compile for
half a minute, and neither its fuel nor its other limits end that. Compiled grammars cannot be
handed from one process to another, either. So no process of a cluster calls the library for a
client's grammar. **A grammar is a process**:

    fork server one per worker or router; has the tokenizer loaded, serves nothing, forks (`fork_server`)
      └─ grammar    one per grammar: compiles it, and stays to compute its masks (`child`, `library`)

The fork costs milliseconds, whatever the size of the vocabulary. Each child has a limit on its
memory, and on the processor's time while it compiles, that the kernel enforces; a wait for it
(`process`) has a deadline and a file descriptor to kill it by (`children`). A grammar that crashes
the library, exhausts memory or never ends takes nothing along; the masks of different grammars are
computed side by side, on other cores than the engine's thread.

Four bounds stand before that, in this order: the size and shape of the text (`language`), what was
refused before (`checking`), a compilation in a short time, of which many may wait, and one in a
longer time, of which few may. A grammar that compiles slowly thus never stands in the way of those
that compile fast.
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
