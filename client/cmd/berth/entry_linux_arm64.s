#include "textflag.h"

// A system call keeps every register but R0, so that the runtime starts as it would have without this:
// it reads its arguments from the stack. 25 is fcntl, 1 is F_GETFD.

// func entry()
TEXT ·entry(SB), NOSPLIT|NOFRAME, $0
	MOVD $0, R3
	MOVD $·closedAtStart(SB), R4

next:
	MOVD R3, R0
	MOVD $1, R1
	MOVD $25, R8
	SVC
	TBZ  $63, R0, open
	MOVD $1, R5
	LSL  R3, R5, R5
	MOVD (R4), R6
	ORR  R5, R6, R6
	MOVD R6, (R4)

open:
	ADD  $1, R3
	CMP  $3, R3
	BLT  next
	JMP  _rt0_arm64_linux(SB)
