/*
heads.h -- what happens to the queries and keys of each head before attention.
*/
#ifndef LLMC_HEADS_H
#define LLMC_HEADS_H

// Norms of queries and keys: none; of each head, or of a whole row, with weights; of each head,
// without weights.
typedef enum { HEADS_PLAIN, HEADS_NORM, HEADS_ROW_NORM, HEADS_UNIT_NORM } HeadsKind;

#endif
