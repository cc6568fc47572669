"""Serves a language model over HTTP, with OpenAI's endpoints for completions and chats.

Takes a directory and options; gives answers on rank 0 while all ranks compute. Begin with
`commands`; `engine` joins the web server's thread with the steps of the ranks.
"""
