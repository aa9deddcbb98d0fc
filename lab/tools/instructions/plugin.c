/* A plugin of qemu that prints how many instructions a program has executed (arm_instructions.sh). */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Of qemu-plugin.h, which packages of qemu lack. */
typedef uint64_t qemu_plugin_id_t;
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, void (*seen)(qemu_plugin_id_t, void *));
size_t qemu_plugin_tb_n_insns(const void *block);
void qemu_plugin_register_vcpu_tb_exec_inline(void *block, int add, void *to, uint64_t number);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*ended)(qemu_plugin_id_t, void *), void *own);

int qemu_plugin_version = 1;
static uint64_t count;

static void seen(qemu_plugin_id_t id, void *block) {
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &count, qemu_plugin_tb_n_insns(block));
}

static void ended(qemu_plugin_id_t id, void *own) {
    (void)id, (void)own;
    fprintf(stderr, "%llu\n", (unsigned long long)count);
}

int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int count_of, char **words) {
    (void)info, (void)count_of, (void)words;
    qemu_plugin_register_vcpu_tb_trans_cb(id, seen);
    qemu_plugin_register_atexit_cb(id, ended, NULL);
    return 0;
}
