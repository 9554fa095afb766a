"""An OpenAI-compatible server in front of the generators: an agent that speaks to it, unmodified, is trained.

    agent (openai client) ── POST /v1/chat/completions ──► server ──► Gateway.chat
                                                                        session.begin     whose conversation goes on?
                                                                        call.given        tokens of new messages only
                                                                        generators.generate
                                                                        session.record    ids, log-probs, versions
                                                                        journal           one line, before the answer
                          ◄── JSON, or chunks ─────────────────────────
    trainer ── open ──► session (key, limits) ... reward ... close ──► one EpisodeTokens a leaf of its tree

Who waits for whom. A chat call waits for the gateway's one tokenizing thread, for a generator, for its journal; all of
them together until the call's time-out or its session's deadline, whichever is first. Only `generate` holds a place in
a generator: an agent that runs a tool for a minute holds nothing. No call waits for another: a session with too many at
once is told so (429). A client that goes away, and the end of a session, cancel what is generated for it. The event
loop tokenises nothing; it parses answers (milliseconds).

A chat call carries its whole conversation. What of it was recorded goes on token by token; the rest is rendered and
given, an assistant message that nobody sampled included. Generators answer when they are done, so a streamed answer
comes token by token, but all at once.

    config.py         options and limits
    conversations.py  messages in one form, to be compared; pure
    sessions.py       a session: its tree of turns, and the samples they make; pure
    saved.py          a session as lines of JSON, and back; pure
    journal.py        those lines in a file
    requests.py       what a chat request asks for, and what of it cannot be; pure
    answers.py        sampled tokens as text, in pieces, up to a stop; pure
    responses.py      an answer in OpenAI's form, whole or in chunks; pure
    chat.py           one chat call, from what is new to an answer on record
    gateway.py        sessions, generators and journals together: what a trainer uses
    server.py         HTTP
    agents.py         how an agent is run: a function or a program, as an environment of one step
    rollout.py        from a task to a group by way of agents' sessions

A client whose answer was lost asks again; its session may have gone to another server meanwhile, by way of a journal.
That one tells it the answer that is on record, if there is one, so that no answer is trained that nobody heard.
"""
