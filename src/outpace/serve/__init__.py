"""An HTTP server with OpenAI's API in front of an engine. The extra ``outpace[serve]`` installs its needs.

A request passes five stages, whatever its API:

1. Route. ``protocol`` limits a connection's size and time. ``middleware`` gives the request an id, checks its
   key (``auth``) and logs it (``telemetry``). ``routes`` has the paths, each with its handler and the type of
   its body.
2. Parse. ``body`` receives the body and parses it to that type. Each API has one module with its types, its
   handler and its formats: ``chat``, ``completions``, ``messages``, ``responses``, ``tokens``. Types of two
   are in ``messages_body`` and ``responses_body``. ``fields`` has what their bodies share, ``known`` the
   fields that are refused as others'.
3. Admit. ``Service.start`` in ``service`` reserves room (``admission``). Only then does the API's module turn
   the body into a ``ParsedRequest`` (``request``): the conversation as the template can show it
   (``dialogue``), prompts as token ids (``texts``), sampling parameters, a schema or the grammar of a call
   (``grammar``, ``schemas``; ``tools``, ``calls``, ``pairs`` and ``marked`` have its format), and the
   reasoning before it (``thinking``). Long texts and schemas are read by a ``worker`` of a ``pool``. Of
   whatever clients share there (``totals``) each has a part.
4. Run. ``service`` gives each choice to the engine, with its drafter (``engine``). ``run`` reads what the
   engine emits as ``Event`` objects, and counts it (``metrics``); ``trace`` records the steps on request.
5. Format. ``answers`` takes the text apart: reasoning, text, calls (``json_calls``, ``values``). The API's
   module writes them as one response or as chunks; ``writers`` and ``formats`` have what these share. A
   failure at any stage is a ``Refused`` (``errors``), written in the API's format.

So a wrong field in a chunk of a chat is in ``chat`` or ``writers``, and a wrong event in ``run``.

Before stage 3 the model's service is found: ``host`` is what the routes need of one model (``service``) or of
several (``router``, with their states in ``models`` and their memory in ``room``).

Around the path: ``server`` is a server in this process on a socket of ``listening``, with the ``playground``
at ``/``; ``ray`` is the same application in Ray Serve (``hosted``), with a choice among ``replicas``.
"""
