"""What transformer and runtime share: the arithmetic and the words of the files between them.

Takes values of symbols and shardings of known size; gives sizes, shards and element types, with no
package but numpy (and its bfloat16). Both sides import it, and it imports neither. Begin with
`boxes` for which elements of a tensor a rank holds, and with `expressions` for sizes; `options` has
what the command line asks of the runtime.
"""
