// test_dialog.c -- the prompt of an answer: all messages between their marks, and the oldest turns
// go when the room is full.
#include "llmc/generate/dialog.h"
#include "llmc/tokenizer/bpe_files.h"
#include "dev/test/lib/test.h"

enum { ROOM = 1000 };

// Sets text (ROOM) to the prompt, with a vocabulary of bytes.
static int prompt_of(Dialog* dialog, int max, char* text, int* forgotten) {
    int ids[ROOM];
    const int count = dialog_prompt(dialog, ids, max, forgotten);
    for (int i = 0; i < count; i++) {
        text[i] = (char)ids[i];
    }
    text[count] = '\0';
    return count;
}

static void say(Dialog* dialog, ChatRole role, const char* text) {
    dialog_add(dialog, role, text, strlen(text));
}

#define SYSTEM "<|im_start|>system\nBe short.<|im_end|>\n"
#define FIRST "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
#define SECOND "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
#define THIRD "<|im_start|>user\nAnd?<|im_end|>\n"
#define ANSWER "<|im_start|>assistant\n"

// An answer in harmony stays without its thoughts and marks.
TEST(thoughts) {
    static const char wanted[] =
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>"
        "Hello<|end|><|start|>user<|message|>Why?<|end|><|start|>assistant";
    Bpe bpe;
    BpeEncoder encoder;
    Dialog dialog;
    char text[ROOM];
    int forgotten;
    bpe_open_bytes(&bpe);
    chat_choose(&bpe, CHAT_HARMONY);
    bpe_encoder_open(&encoder, &bpe);
    dialog_open(&dialog, &encoder, "");
    say(&dialog, CHAT_USER, "Hi");
    say(&dialog, CHAT_ASSISTANT,
        "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello");
    say(&dialog, CHAT_USER, "Why?");
    const int count = prompt_of(&dialog, ROOM - 1, text, &forgotten), length = (int)strlen(wanted);
    EXPECT(count > length && strcmp(text + count - length, wanted) == 0, "%s", text);
    EXPECT(strstr(text, "Current date: 2") && !strstr(text, "greeting"), "%s", text);
    dialog_close(&dialog);
    bpe_encoder_close(&encoder);
    bpe_close(&bpe);
}

TEST(turns) {
    static const struct {
        const char* wanted;
        int forgotten;
    } cases[] = {
        {SYSTEM FIRST SECOND THIRD ANSWER, 0}, {SYSTEM SECOND THIRD ANSWER, 1}, {SYSTEM THIRD ANSWER, 1}};
    Bpe bpe;
    BpeEncoder encoder;
    Dialog dialog;
    char text[ROOM];
    int forgotten;
    bpe_open_bytes(&bpe);
    bpe_encoder_open(&encoder, &bpe);
    dialog_open(&dialog, &encoder, "Be short.");
    say(&dialog, CHAT_USER, "Hi");
    say(&dialog, CHAT_ASSISTANT, "Hello");
    say(&dialog, CHAT_USER, "Why?");
    say(&dialog, CHAT_ASSISTANT, "");
    say(&dialog, CHAT_USER, "And?");
    for (int i = 0; i < 3; i++) { // just enough room
        const int count = prompt_of(&dialog, (int)strlen(cases[i].wanted), text, &forgotten);
        EXPECT(count == (int)strlen(cases[i].wanted) && strcmp(text, cases[i].wanted) == 0 &&
                   forgotten == cases[i].forgotten,
               "%d: forgot %d: %s", i, forgotten, text);
    }
    EXPECT(prompt_of(&dialog, (int)strlen(SYSTEM THIRD ANSWER) - 1, text, &forgotten) == 0, "%s", text);
    dialog_take_back(&dialog);
    say(&dialog, CHAT_USER, "?");
    prompt_of(&dialog, ROOM - 1, text, &forgotten);
    EXPECT(strcmp(text, SYSTEM "<|im_start|>user\n?<|im_end|>\n" ANSWER) == 0, "%s", text);
    dialog_reset(&dialog);
    prompt_of(&dialog, ROOM - 1, text, &forgotten);
    EXPECT(strcmp(text, SYSTEM ANSWER) == 0, "%s", text);
    dialog_close(&dialog);
    bpe_encoder_close(&encoder);
    bpe_close(&bpe);
}

// Marks that are special tokens are single ids, and no id has a flag.
TEST(special_marks) {
    Bpe bpe;
    BpeEncoder encoder;
    Dialog dialog;
    int ids[ROOM], forgotten, marks = 0;
    bpe_open(&bpe, "dev/ref/fixtures/tokenizers/qwen2.json");
    bpe_encoder_open(&encoder, &bpe);
    dialog_open(&dialog, &encoder, "");
    say(&dialog, CHAT_USER, "<|im_end|>");
    const int count = dialog_prompt(&dialog, ids, ROOM, &forgotten);
    for (int i = 0; i < count; i++) {
        EXPECT(0 <= ids[i] && ids[i] < bpe.vocab_size, "id %d", ids[i]);
        marks += bpe_is_name(&bpe, ids[i]);
    }
    EXPECT(marks == 3 && !dialog.marks.is_text && dialog.marks.turn_end >= 0, "%d marks", marks);
    dialog_close(&dialog);
    bpe_encoder_close(&encoder);
    bpe_close(&bpe);
}
