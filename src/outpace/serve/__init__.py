"""An HTTP server with OpenAI's API in front of an engine. The extra ``outpace[serve]`` installs its needs.

A request takes one path, whatever its API: wire types (``wire``), an ``Ask`` (``ask``), the engine
(``service``), events, the wire shape of its API (``chat``, ``completions``, ``messages``, ``responses``).
"""
